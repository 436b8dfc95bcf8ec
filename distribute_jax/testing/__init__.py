"""Checks for your own tests: a step against one device, the promises of a strategy, real processes."""

from distribute_jax._lazy import public_names, publish
from distribute_jax.testing._check_strategy import (
    StrategyReport as StrategyReport,
    check_strategy as check_strategy,
)
from distribute_jax.testing._local_cluster import (
    Fault as Fault,
    LocalCluster as LocalCluster,
    ProcessResult as ProcessResult,
)
from distribute_jax.testing._one_device import (
    check_equals_one_device as check_equals_one_device,
    replay_step as replay_step,
    simulate as simulate,
)
from distribute_jax.testing._servers import (
    Log as Log,
    disturb_messages as disturb_messages,
    kill as kill,
    record as record,
    replay as replay,
)
from distribute_jax.testing._strategies import strategy_combinations as strategy_combinations

__all__ = public_names(globals())

publish(globals(), [name for name in __all__ if name != "simulate"], "distribute_jax.testing")
