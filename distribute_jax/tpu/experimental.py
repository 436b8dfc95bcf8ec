"""The names of ``tf.tpu.experimental``."""

from distribute_jax._lazy import publish
from distribute_jax.tpu._topology import DeviceAssignment, Topology, initialize_tpu_system

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system"]

publish(globals(), __all__, "distribute_jax.tpu.experimental")
