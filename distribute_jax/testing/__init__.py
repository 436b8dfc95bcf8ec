"""Checks for your own tests: does a step equal one device, on simulated devices."""

from distribute_jax._public import publish
from distribute_jax.testing._equals import check_equals_one_device as check_equals_one_device
from distribute_jax.testing._simulate import simulate as simulate

__all__ = ["check_equals_one_device", "simulate"]

publish(globals(), ["check_equals_one_device"], "distribute_jax.testing")
