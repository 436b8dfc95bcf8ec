"""``dj.Variable``: an ``nnx.Variable`` with TensorFlow's rules of synchronization and aggregation."""

from distribute_jax.variables._access import (
    readable_by_other_threads as readable_by_other_threads,
    readable_raw as readable_raw,
)
from distribute_jax.variables._rules import (
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
    first_replica as first_replica,
    record_created as record_created,
)
from distribute_jax.variables._variable import (
    Variable as Variable,
    aggregated as aggregated,
    components_for as components_for,
    mesh_of_components as mesh_of_components,
    on_replicas as on_replicas,
)
