"""What TensorFlow has in ``tf.distribute.experimental``, under the same names."""

from distribute_jax.collectives import (
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from distribute_jax.strategies import ValueContext as ValueContext

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]
