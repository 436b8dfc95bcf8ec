"""The names of ``tf.distribute.experimental``."""

from typing import TYPE_CHECKING

from distribute_jax._lazy import lazy_exports, publish
from distribute_jax.collectives import CommunicationImplementation, CommunicationOptions
from distribute_jax.data import AutoShardPolicy
from distribute_jax.servers import partitioners
from distribute_jax.strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
    ValueContext,
)

if TYPE_CHECKING:
    from distribute_jax.checkpoint._preemption_handler import (
        PreemptionCheckpointHandler,
        TerminationConfig,
    )
else:
    __getattr__ = lazy_exports(
        globals(),
        {"checkpoint._preemption_handler": ("PreemptionCheckpointHandler", "TerminationConfig")},
    )

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "partitioners",
]

publish(globals(), ["CommunicationImplementation", "CommunicationOptions"], __name__)
