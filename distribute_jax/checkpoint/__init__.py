"""Checkpoints: complete or absent, verified by digests, restored under any strategy."""

from distribute_jax._lazy import publish
from distribute_jax.checkpoint._manager import CheckpointManager
from distribute_jax.checkpoint._save_load import load, save

__all__ = ["CheckpointManager", "load", "save"]

publish(globals(), ["load", "save"], "distribute_jax.checkpoint")
