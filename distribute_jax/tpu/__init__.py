"""The cores of a TPU: their coordinates, which of them make a replica, and in which order.

``experimental`` has the names that TensorFlow has in ``tf.tpu.experimental``.
"""

from distribute_jax.tpu import experimental

__all__ = ["experimental"]
