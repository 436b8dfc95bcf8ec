"""The public names; ``__init__.py`` reads here from which part to import each on first access."""

from distribute_jax import (
    callbacks as callbacks,
    cluster_resolver as cluster_resolver,
    coordinator as coordinator,
    data as data,
    experimental as experimental,
    losses as losses,
    metrics as metrics,
    summary as summary,
    testing as testing,
    tpu as tpu,
)
from distribute_jax._errors import (
    ArgumentError as ArgumentError,
    ArgumentTypeError as ArgumentTypeError,
    BackendStartedError as BackendStartedError,
    CancelledError as CancelledError,
    CheckpointDamagedError as CheckpointDamagedError,
    CheckpointError as CheckpointError,
    CheckpointFileError as CheckpointFileError,
    ClusterError as ClusterError,
    ContextError as ContextError,
    DeadlineExceededError as DeadlineExceededError,
    DeadlockError as DeadlockError,
    DistributeError as DistributeError,
    DonatedError as DonatedError,
    EndOfDataError as EndOfDataError,
    IterationError as IterationError,
    LoweringError as LoweringError,
    MissingPackageError as MissingPackageError,
    MixedStrategiesError as MixedStrategiesError,
    NoClusterError as NoClusterError,
    NotEqualError as NotEqualError,
    OutOfSyncError as OutOfSyncError,
    PaddingLeakError as PaddingLeakError,
    PerReplicaAttributeError as PerReplicaAttributeError,
    PerReplicaError as PerReplicaError,
    PerReplicaTypeError as PerReplicaTypeError,
    ProcessesDifferError as ProcessesDifferError,
    ProcessFailedError as ProcessFailedError,
    ServiceError as ServiceError,
    StaleCaptureError as StaleCaptureError,
    StepFailedError as StepFailedError,
    StepsSkippedError as StepsSkippedError,
    TaskConflictError as TaskConflictError,
    TFConfigError as TFConfigError,
    TracedValueError as TracedValueError,
    UnsupportedError as UnsupportedError,
)
from distribute_jax._values import (
    DistributedValues as DistributedValues,
    Mirrored as Mirrored,
    PerReplica as PerReplica,
)
from distribute_jax.checkpoint import CheckpointManager as CheckpointManager
from distribute_jax.collectives import (
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReduceOp as ReduceOp,
    ReductionToOneDevice as ReductionToOneDevice,
    RingAllReduce as RingAllReduce,
    assume_mirrored as assume_mirrored,
    check_in_sync as check_in_sync,
)
from distribute_jax.data import (
    AutoShardPolicy as AutoShardPolicy,
    DatasetCreator as DatasetCreator,
    DistributedDataset as DistributedDataset,
    DistributedIterator as DistributedIterator,
    InputContext as InputContext,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    PartialPolicy as PartialPolicy,
)
from distribute_jax.losses import (
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)
from distribute_jax.processes import (
    ClusterOptions as ClusterOptions,
    is_chief as is_chief,
    report_step as report_step,
)
from distribute_jax.processes._connect import (
    experimental_connect_to_cluster as experimental_connect_to_cluster,
)
from distribute_jax.program import (
    PlanTable as PlanTable,
    ReplicaContext as ReplicaContext,
    RunOptions as RunOptions,
    StepPlan as StepPlan,
    per_example as per_example,
    plan as plan,
    register_aggregation as register_aggregation,
    same_on_all_replicas as same_on_all_replicas,
    snapshot as snapshot,
)
from distribute_jax.servers._ray import Server as Server
from distribute_jax.strategies import (
    CentralStorageStrategy as CentralStorageStrategy,
    FullyShardedStrategy as FullyShardedStrategy,
    MirroredStrategy as MirroredStrategy,
    ModelParallelStrategy as ModelParallelStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    OneDeviceStrategy as OneDeviceStrategy,
    Strategy as Strategy,
    TPUStrategy as TPUStrategy,
    ValueContext as ValueContext,
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from distribute_jax.strategies._parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
    ServerOptions as ServerOptions,
)
from distribute_jax.testing import simulate as simulate
from distribute_jax.tpu.experimental import initialize_tpu_system as initialize_tpu_system
from distribute_jax.training import (
    AddedLoss as AddedLoss,
    DTypePolicy as DTypePolicy,
    Model as Model,
    Optimizer as Optimizer,
    SidecarEvaluator as SidecarEvaluator,
    unpack_x_y_sample_weight as unpack_x_y_sample_weight,
)
from distribute_jax.variables import (
    Variable as Variable,
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)

__all__: list[str]
__version__: str
