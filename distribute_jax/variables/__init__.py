"""Variables whose writes and reads combine the replicas: TensorFlow's, on ``nnx.Variable``."""

from distribute_jax.variables._kinds import (
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from distribute_jax.variables._variable import Variable as Variable

__all__ = ["Variable", "VariableAggregation", "VariableSynchronization"]
