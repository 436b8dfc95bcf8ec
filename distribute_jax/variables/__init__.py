"""Variables whose writes and reads combine the replicas: TensorFlow's, on ``nnx.Variable``."""

from distribute_jax.variables._access import (
    readable_elsewhere as readable_elsewhere,
    readable_raw as readable_raw,
)
from distribute_jax.variables._components import first_replica as first_replica
from distribute_jax.variables._rules import (
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
    noting_created as noting_created,
)
from distribute_jax.variables._variable import (
    Variable as Variable,
    aggregated as aggregated,
    components_for as components_for,
    on_replicas as on_replicas,
    where_components_lie as where_components_lie,
)

__all__ = [
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "aggregated",
    "components_for",
    "first_replica",
    "noting_created",
    "on_replicas",
    "readable_elsewhere",
    "readable_raw",
    "where_components_lie",
]
