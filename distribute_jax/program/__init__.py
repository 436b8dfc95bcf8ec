"""A per-replica function becomes one program: bind, trace, prove, lower, call."""

from distribute_jax.program._failed import is_runtime_failure as is_runtime_failure
from distribute_jax.program._options import (
    RunOptions as RunOptions,
    library_options as library_options,
)
from distribute_jax.program._run import Runner as Runner, one_at_a_time as one_at_a_time
from distribute_jax.program._snapshot import snapshot as snapshot
from distribute_jax.program.binding._aggregation import (
    Combine as Combine,
    register_aggregation as register_aggregation,
)
from distribute_jax.program.lowering._home import Home as Home
from distribute_jax.program.lowering._merge import (
    MergeRule as MergeRule,
    moments_combined as moments_combined,
    register_merge as register_merge,
)
from distribute_jax.program.tracing._per_example import per_example as per_example
from distribute_jax.program.tracing._random import same_on_all_replicas as same_on_all_replicas
from distribute_jax.program.tracing._replica import (
    MergedValues as MergedValues,
    ReplicaContext as ReplicaContext,
)

__all__ = [
    "Combine",
    "Home",
    "MergeRule",
    "MergedValues",
    "ReplicaContext",
    "RunOptions",
    "Runner",
    "is_runtime_failure",
    "library_options",
    "moments_combined",
    "one_at_a_time",
    "per_example",
    "register_aggregation",
    "register_merge",
    "same_on_all_replicas",
    "snapshot",
]
