"""What TensorFlow has in ``tf.distribute.experimental``, under the same names."""

from distribute_jax._lazy import publish
from distribute_jax.collectives import (
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from distribute_jax.data import AutoShardPolicy as AutoShardPolicy
from distribute_jax.strategies import (
    CentralStorageStrategy as CentralStorageStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    TPUStrategy as TPUStrategy,
    ValueContext as ValueContext,
)

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "TPUStrategy",
    "ValueContext",
]

publish(globals(), ["CommunicationImplementation", "CommunicationOptions"], __name__)
