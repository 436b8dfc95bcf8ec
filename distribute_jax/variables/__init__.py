"""Variables whose writes and reads combine the replicas: TensorFlow's, on ``nnx.Variable``."""

from distribute_jax.variables._access import readable_by_other_threads, readable_raw
from distribute_jax.variables._components import first_replica
from distribute_jax.variables._rules import (
    VariableAggregation,
    VariableSynchronization,
    record_created,
)
from distribute_jax.variables._variable import (
    Variable,
    aggregated,
    components_for,
    mesh_of_components,
    on_replicas,
)

__all__ = [
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "aggregated",
    "components_for",
    "first_replica",
    "mesh_of_components",
    "on_replicas",
    "readable_by_other_threads",
    "readable_raw",
    "record_created",
]
