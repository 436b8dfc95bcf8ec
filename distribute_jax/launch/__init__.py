"""The processes of a job on this machine: started, watched, stopped and restarted together.

``_process`` starts and stops processes; ``_verdict`` decides what happens after an attempt, and
``_supervisor`` does it.
"""

from distribute_jax.launch._supervisor import CACHE, cache_folder, say, supervise

__all__ = ["CACHE", "cache_folder", "say", "supervise"]
