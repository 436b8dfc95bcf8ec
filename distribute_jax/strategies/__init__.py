"""The strategies, one in each file: a mesh and a few options, from which the base class derives the rest."""

from distribute_jax.strategies import _current as _current
from distribute_jax.strategies._base import Strategy as Strategy, ValueContext as ValueContext
from distribute_jax.strategies._central_storage import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from distribute_jax.strategies._current import (
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from distribute_jax.strategies._fully_sharded import FullyShardedStrategy as FullyShardedStrategy
from distribute_jax.strategies._mirrored import MirroredStrategy as MirroredStrategy
from distribute_jax.strategies._model_parallel import ModelParallelStrategy as ModelParallelStrategy
from distribute_jax.strategies._multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from distribute_jax.strategies._one_device import OneDeviceStrategy as OneDeviceStrategy
from distribute_jax.strategies._tpu import TPUStrategy as TPUStrategy
