"""Keras's callbacks: code that ``fit``, ``evaluate`` and ``predict`` call at fixed points."""

from distribute_jax._lazy import public_names, publish
from distribute_jax.training.callbacks._callback import (
    Callback as Callback,
    History as History,
    LambdaCallback as LambdaCallback,
)
from distribute_jax.training.callbacks._checkpoints import (
    BackupAndRestore as BackupAndRestore,
    ModelCheckpoint as ModelCheckpoint,
)
from distribute_jax.training.callbacks._debug import (
    CheckInSync as CheckInSync,
    LossSpike as LossSpike,
    ProfilerCallback as ProfilerCallback,
    ReplaySteps as ReplaySteps,
    TerminateOnNaN as TerminateOnNaN,
)
from distribute_jax.training.callbacks._loggers import (
    CSVLogger as CSVLogger,
    LogEvery as LogEvery,
    MLflowLogger as MLflowLogger,
    TensorBoard as TensorBoard,
    WandbLogger as WandbLogger,
)
from distribute_jax.training.callbacks._monitor import (
    EarlyStopping as EarlyStopping,
    LearningRateFinder as LearningRateFinder,
    LearningRateScheduler as LearningRateScheduler,
    ReduceLROnPlateau as ReduceLROnPlateau,
    SwapEMAWeights as SwapEMAWeights,
)

__all__ = public_names(globals())

publish(globals(), __all__, __name__)
