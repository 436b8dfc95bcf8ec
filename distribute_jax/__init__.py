"""TensorFlow's ``tf.distribute``, natively on JAX, for Flax models.

Pick a strategy, build the model under ``strategy.scope()``, write the step for one replica, and
``strategy.run`` executes it on all. A tour of the folders, each importing only from those above it:

- ``collectives``: sums, means and gathers over the replicas;
- ``program``: a per-replica function becomes one compiled program: bind, trace, prove, lower, call;
- ``data``: global batches spread over the replicas, exact to the last example;
- ``strategies``: one file each: a mesh and a few choices;
- ``training``: losses over the global batch;
- ``testing``: equivalence checks and simulated devices for your own tests.
"""

from distribute_jax import data as data
from distribute_jax import testing as testing
from distribute_jax._errors import ArgumentError as ArgumentError
from distribute_jax._errors import BackendStartedError as BackendStartedError
from distribute_jax._errors import ContextError as ContextError
from distribute_jax._errors import DeadlockError as DeadlockError
from distribute_jax._errors import DistributeError as DistributeError
from distribute_jax._errors import DonatedError as DonatedError
from distribute_jax._errors import MixedStrategiesError as MixedStrategiesError
from distribute_jax._errors import NotEqualError as NotEqualError
from distribute_jax._errors import OutOfSyncError as OutOfSyncError
from distribute_jax._errors import PaddingLeakError as PaddingLeakError
from distribute_jax._errors import PerReplicaError as PerReplicaError
from distribute_jax._errors import PerReplicaTypeError as PerReplicaTypeError
from distribute_jax._errors import StaleCaptureError as StaleCaptureError
from distribute_jax._errors import StepFailedError as StepFailedError
from distribute_jax._errors import TracedValueError as TracedValueError
from distribute_jax._values import DistributedValues as DistributedValues
from distribute_jax._values import Mirrored as Mirrored
from distribute_jax._values import PerReplica as PerReplica
from distribute_jax.collectives import ReduceOp as ReduceOp
from distribute_jax.collectives import assume_mirrored as assume_mirrored
from distribute_jax.data import DistributedDataset as DistributedDataset
from distribute_jax.data import DistributedIterator as DistributedIterator
from distribute_jax.data import InputOptions as InputOptions
from distribute_jax.data import PartialPolicy as PartialPolicy
from distribute_jax.program import ReplicaContext as ReplicaContext
from distribute_jax.program import RunOptions as RunOptions
from distribute_jax.program import per_example as per_example
from distribute_jax.program import snapshot as snapshot
from distribute_jax.strategies import MirroredStrategy as MirroredStrategy
from distribute_jax.strategies import OneDeviceStrategy as OneDeviceStrategy
from distribute_jax.strategies import Strategy as Strategy
from distribute_jax.strategies import ValueContext as ValueContext
from distribute_jax.strategies import experimental_set_strategy as experimental_set_strategy
from distribute_jax.strategies import get_replica_context as get_replica_context
from distribute_jax.strategies import get_strategy as get_strategy
from distribute_jax.strategies import has_strategy as has_strategy
from distribute_jax.strategies import in_cross_replica_context as in_cross_replica_context
from distribute_jax.testing import simulate as simulate
from distribute_jax.training import compute_average_loss as compute_average_loss
from distribute_jax.training import scale_regularization_loss as scale_regularization_loss

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackendStartedError",
    "ContextError",
    "DeadlockError",
    "DistributeError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DonatedError",
    "InputOptions",
    "Mirrored",
    "MirroredStrategy",
    "MixedStrategiesError",
    "NotEqualError",
    "OneDeviceStrategy",
    "OutOfSyncError",
    "PaddingLeakError",
    "PartialPolicy",
    "PerReplica",
    "PerReplicaError",
    "PerReplicaTypeError",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "StaleCaptureError",
    "StepFailedError",
    "Strategy",
    "TracedValueError",
    "ValueContext",
    "assume_mirrored",
    "compute_average_loss",
    "data",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "per_example",
    "scale_regularization_loss",
    "simulate",
    "snapshot",
    "testing",
]
