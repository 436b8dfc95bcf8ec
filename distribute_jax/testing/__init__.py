"""Checks for your own tests: does a step equal one device, does a strategy keep the promises."""

from distribute_jax._public import publish
from distribute_jax.testing._check_strategy import (
    StrategyReport as StrategyReport,
    check_strategy as check_strategy,
)
from distribute_jax.testing._combinations import strategy_combinations as strategy_combinations
from distribute_jax.testing._equals import check_equals_one_device as check_equals_one_device
from distribute_jax.testing._simulate import simulate as simulate

__all__ = [
    "StrategyReport",
    "check_equals_one_device",
    "check_strategy",
    "simulate",
    "strategy_combinations",
]

publish(
    globals(),
    ["StrategyReport", "check_equals_one_device", "check_strategy", "strategy_combinations"],
    "distribute_jax.testing",
)
