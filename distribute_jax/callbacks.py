"""Keras's callbacks: code that ``fit``, ``evaluate`` and ``predict`` call at fixed points."""

from typing import TYPE_CHECKING

from distribute_jax._lazy import lazy_exports, publish
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

if not TYPE_CHECKING:
    __getattr__ = lazy_exports(globals(), {})
