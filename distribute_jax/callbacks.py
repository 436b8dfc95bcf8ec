"""Keras's callbacks: code that ``fit``, ``evaluate`` and ``predict`` call at fixed points."""

from distribute_jax._lazy import publish
from distribute_jax.training.callbacks._callback import Callback, History, LambdaCallback
from distribute_jax.training.callbacks._checkpoints import BackupAndRestore, ModelCheckpoint
from distribute_jax.training.callbacks._debug import (
    CheckInSync,
    LossSpike,
    ProfilerCallback,
    ReplaySteps,
    TerminateOnNaN,
)
from distribute_jax.training.callbacks._loggers import (
    CSVLogger,
    LogEvery,
    MLflowLogger,
    TensorBoard,
    WandbLogger,
)
from distribute_jax.training.callbacks._monitor import (
    EarlyStopping,
    LearningRateFinder,
    LearningRateScheduler,
    ReduceLROnPlateau,
    SwapEMAWeights,
)

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CheckInSync",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateScheduler",
    "LogEvery",
    "LossSpike",
    "MLflowLogger",
    "ModelCheckpoint",
    "ProfilerCallback",
    "ReduceLROnPlateau",
    "ReplaySteps",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "WandbLogger",
]

publish(globals(), __all__, __name__)
