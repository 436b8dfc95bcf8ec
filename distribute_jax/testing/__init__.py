"""Checks for your own tests: a step against one device, the promises of a strategy, real processes."""

from distribute_jax._lazy import publish
from distribute_jax.testing._check_strategy import StrategyReport, check_strategy
from distribute_jax.testing._fault import Fault
from distribute_jax.testing._local_cluster import LocalCluster, ProcessResult
from distribute_jax.testing._one_device import check_equals_one_device, replay_step, simulate
from distribute_jax.testing._servers import Log, disturb_messages, kill, record, replay
from distribute_jax.testing._strategies import strategy_combinations

__all__ = [
    "Fault",
    "LocalCluster",
    "Log",
    "ProcessResult",
    "StrategyReport",
    "check_equals_one_device",
    "check_strategy",
    "disturb_messages",
    "kill",
    "record",
    "replay",
    "replay_step",
    "simulate",
    "strategy_combinations",
]

publish(globals(), [name for name in __all__ if name != "simulate"], "distribute_jax.testing")
