"""TPU topology and device assignment; ``experimental`` has the names of ``tf.tpu.experimental``."""

from distribute_jax.tpu import experimental

__all__ = ["experimental"]
