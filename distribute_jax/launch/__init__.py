"""Supervises the processes of a job on this machine: starts, watches, stops and restarts them together.

``_process`` starts and stops processes, ``_verdict`` decides whether to restart them, and ``_supervisor``
runs the attempts.
"""

from distribute_jax.launch._supervisor import CACHE, cache_folder, say, supervise

__all__ = ["CACHE", "cache_folder", "say", "supervise"]
