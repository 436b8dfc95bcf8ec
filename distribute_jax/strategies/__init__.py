"""One file for each strategy: its mesh and its choices; the base class derives the rest."""

from distribute_jax.strategies import _current as _current
from distribute_jax.strategies._base import Strategy, ValueContext
from distribute_jax.strategies._central_storage import CentralStorageStrategy
from distribute_jax.strategies._current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from distribute_jax.strategies._fully_sharded import FullyShardedStrategy
from distribute_jax.strategies._mirrored import MirroredStrategy
from distribute_jax.strategies._model_parallel import ModelParallelStrategy
from distribute_jax.strategies._multi_worker import MultiWorkerMirroredStrategy
from distribute_jax.strategies._one_device import OneDeviceStrategy
from distribute_jax.strategies._tpu import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "FullyShardedStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "TPUStrategy",
    "ValueContext",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
