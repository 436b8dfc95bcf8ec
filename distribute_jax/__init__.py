"""TensorFlow's ``tf.distribute``, natively on JAX, for Flax models.

Pick a strategy, build the model under ``strategy.scope()``, write the step for one replica, and
``strategy.run`` executes it on all. ``docs/architecture.md`` shows the packages, each of which imports only
from those below it.
"""

from typing import TYPE_CHECKING

from distribute_jax import _errors
from distribute_jax._lazy import lazy_exports, publish

# Everything loads when a name of it is first read: the core at once, for which JAX is imported, so that the
# supervisor of a job does without; and each part that builds on `run` and the strategies by itself.
if TYPE_CHECKING:
    from distribute_jax import (
        callbacks,
        cluster_resolver,
        coordinator,
        data,
        experimental,
        losses,
        metrics,
        summary,
        testing,
        tpu,
    )
    from distribute_jax._errors import (
        ArgumentError,
        ArgumentTypeError,
        BackendStartedError,
        CancelledError,
        CheckpointDamagedError,
        CheckpointError,
        CheckpointFileError,
        ClusterError,
        ContextError,
        DeadlineExceededError,
        DeadlockError,
        DistributeError,
        DonatedError,
        EndOfDataError,
        IterationError,
        LoweringError,
        MissingPackageError,
        MixedStrategiesError,
        NoClusterError,
        NotEqualError,
        OutOfSyncError,
        PaddingLeakError,
        PerReplicaAttributeError,
        PerReplicaError,
        PerReplicaTypeError,
        ProcessesDifferError,
        ProcessFailedError,
        ServiceError,
        StaleCaptureError,
        StepFailedError,
        StepsSkippedError,
        TaskConflictError,
        TFConfigError,
        TracedValueError,
        UnsupportedError,
    )
    from distribute_jax._values import DistributedValues, Mirrored, PerReplica
    from distribute_jax.checkpoint import CheckpointManager
    from distribute_jax.collectives import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReduceOp,
        ReductionToOneDevice,
        RingAllReduce,
        assume_mirrored,
        check_in_sync,
    )
    from distribute_jax.data import (
        AutoShardPolicy,
        DatasetCreator,
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputReplicationMode,
        PartialPolicy,
    )
    from distribute_jax.losses import compute_average_loss, scale_regularization_loss
    from distribute_jax.processes import ClusterOptions, is_chief, report_step
    from distribute_jax.processes._connect import experimental_connect_to_cluster
    from distribute_jax.program import (
        PlanTable,
        ReplicaContext,
        RunOptions,
        StepPlan,
        per_example,
        plan,
        register_aggregation,
        same_on_all_replicas,
        snapshot,
    )
    from distribute_jax.servers._ray import Server
    from distribute_jax.strategies import (
        CentralStorageStrategy,
        FullyShardedStrategy,
        MirroredStrategy,
        ModelParallelStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        Strategy,
        TPUStrategy,
        ValueContext,
        experimental_set_strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from distribute_jax.strategies._parameter_server import ParameterServerStrategy, ServerOptions
    from distribute_jax.testing import simulate
    from distribute_jax.tpu._topology import initialize_tpu_system
    from distribute_jax.training import (
        AddedLoss,
        DTypePolicy,
        Model,
        Optimizer,
        SidecarEvaluator,
        unpack_x_y_sample_weight,
    )
    from distribute_jax.variables import Variable, VariableAggregation, VariableSynchronization
else:
    __getattr__ = lazy_exports(
        globals(),
        {
            "callbacks": (),
            "cluster_resolver": (),
            "checkpoint": ("CheckpointManager",),
            "losses": ("compute_average_loss", "scale_regularization_loss"),
            "coordinator": (),
            "metrics": (),
            "processes._connect": ("experimental_connect_to_cluster",),
            "servers._ray": ("Server",),
            "strategies._parameter_server": ("ParameterServerStrategy", "ServerOptions"),
            "summary": (),
            "testing": ("simulate",),
            "training": (
                "AddedLoss",
                "DTypePolicy",
                "Model",
                "Optimizer",
                "SidecarEvaluator",
                "unpack_x_y_sample_weight",
            ),
        },
        core=(
            *("_errors", "_values", "collectives", "data", "experimental", "processes", "program"),
            *("strategies", "tpu", "tpu._topology", "variables"),
        ),
    )

__version__ = "0.1.0"

__all__ = [
    "AddedLoss",
    "ArgumentError",
    "ArgumentTypeError",
    "AutoShardPolicy",
    "BackendStartedError",
    "CancelledError",
    "CentralStorageStrategy",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointFileError",
    "CheckpointManager",
    "ClusterError",
    "ClusterOptions",
    "ContextError",
    "CrossDeviceOps",
    "DTypePolicy",
    "DatasetCreator",
    "DeadlineExceededError",
    "DeadlockError",
    "DistributeError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DonatedError",
    "EndOfDataError",
    "FullyShardedStrategy",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "IterationError",
    "LoweringError",
    "Mirrored",
    "MirroredStrategy",
    "MissingPackageError",
    "MixedStrategiesError",
    "Model",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "NoClusterError",
    "NotEqualError",
    "OneDeviceStrategy",
    "Optimizer",
    "OutOfSyncError",
    "PaddingLeakError",
    "ParameterServerStrategy",
    "PartialPolicy",
    "PerReplica",
    "PerReplicaAttributeError",
    "PerReplicaError",
    "PerReplicaTypeError",
    "PlanTable",
    "ProcessFailedError",
    "ProcessesDifferError",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "Server",
    "ServerOptions",
    "ServiceError",
    "SidecarEvaluator",
    "StaleCaptureError",
    "StepFailedError",
    "StepPlan",
    "StepsSkippedError",
    "Strategy",
    "TFConfigError",
    "TPUStrategy",
    "TaskConflictError",
    "TracedValueError",
    "UnsupportedError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "assume_mirrored",
    "callbacks",
    "check_in_sync",
    "cluster_resolver",
    "compute_average_loss",
    "coordinator",
    "data",
    "experimental",
    "experimental_connect_to_cluster",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "initialize_tpu_system",
    "is_chief",
    "losses",
    "metrics",
    "per_example",
    "plan",
    "register_aggregation",
    "report_step",
    "same_on_all_replicas",
    "scale_regularization_loss",
    "simulate",
    "snapshot",
    "summary",
    "testing",
    "tpu",
    "unpack_x_y_sample_weight",
]

publish(vars(_errors), __all__, "distribute_jax")  # they show their names, whoever raises them


def __dir__() -> list[str]:
    return sorted(__all__)
