"""A process that no longer says where it is: the others are told before JAX ends them.

JAX misses the heartbeats of a process that is stopped, or whose machine is gone, and then ends every other
process from C++ with SIGABRT, which no Python can stop. So its reason is said shortly before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from distribute_jax.cluster._status import own_status
from distribute_jax.processes._job import Job
from distribute_jax.processes._notes import Place

_BEFORE = 2.5
"""Seconds before JAX, which has no clock in common with this, ends the process."""


class Silence:
    """Says once which process gives no sign of life, and takes it back where it does again."""

    def __init__(self, job: Job) -> None:
        """Begins to listen to the other processes."""
        self._job = job
        self._heard: dict[int, tuple[int, float]] = {}
        self._told: set[int] = set()

    def look(self, places: Mapping[int, Place]) -> None:
        """Looks at who has written since the last time."""
        now = time.monotonic()
        limit = self._job.options.heartbeat_seconds
        for process, place in places.items():
            turn, since = self._heard.get(process, (None, now))
            if turn != place.turn:
                self._heard[process] = place.turn, now
                if process in self._told:
                    self._told.remove(process)
                    own_status().error("")
            elif now - since > max(limit - _BEFORE, limit / 2) and process not in self._told:
                self._told.add(process)
                self._say(process, now - since, place)

    def _say(self, process: int, seconds: float, place: Place) -> None:
        if process == self._job.index:
            return
        limit = self._job.options.heartbeat_seconds
        words = (
            f"{self._job.name_of(process)} gives no sign of life for {seconds:.0f} s; last seen {place}. "
            f"Where it is stopped or gone, JAX ends this process with SIGABRT after {limit} s "
            "(ClusterOptions.heartbeat_seconds)."
        )
        own_status().error(words)
        sys.stderr.write(f"distribute_jax: {words}\n")
        sys.stderr.flush()
