"""What happens around the steps of ``Model.fit``: Keras's callbacks, by Keras's names."""

from distribute_jax._lazy import publish
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
    ProfilerCallback as ProfilerCallback,
    TerminateOnNaN as TerminateOnNaN,
)
from distribute_jax.training.callbacks._loggers import (
    CSVLogger as CSVLogger,
    TensorBoard as TensorBoard,
)
from distribute_jax.training.callbacks._monitor import (
    EarlyStopping as EarlyStopping,
    LearningRateScheduler as LearningRateScheduler,
    ReduceLROnPlateau as ReduceLROnPlateau,
)

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProfilerCallback",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
]

publish(globals(), __all__, "distribute_jax.callbacks")
