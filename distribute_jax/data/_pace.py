"""Who waits for whom: one warning where the input pipeline keeps the devices waiting."""

from __future__ import annotations

import logging
import time

_ELEMENTS, _SECONDS = 20, 5.0
"""What is judged: this many elements, or more of them until this much time has passed."""

_SHARE = 0.2
"""The part of the time that a loop may wait for its batches without a word."""

_log = logging.getLogger("distribute_jax")


class Pace:
    """Adds up, over one loop, how long ``next`` waited; says once where it is much.

    The first element of each stretch is left out: it comes with starting the source and compiling.
    """

    def __init__(self) -> None:
        self._said = False
        self.restart()

    def restart(self) -> None:
        """Begins a new stretch, as each loop over a dataset does."""
        self._start: float | None = None
        self._elements, self._waiting = 0, 0.0

    def waited(self, seconds: float) -> None:
        """Counts one element that the loop waited for."""
        now = time.perf_counter()
        if self._said:
            return
        if self._start is None:
            self._start = now
            return
        self._elements += 1
        self._waiting += seconds
        passed = now - self._start
        if self._elements < _ELEMENTS or passed < _SECONDS:
            return
        if self._waiting > _SHARE * passed:
            self._say(passed)
        self.restart()

    def _say(self, passed: float) -> None:
        self._said = True
        _log.warning(
            "The devices wait for the input pipeline: over the last %d batches the loop waited for "
            "data %.0f %% of the time, %.0f of %.0f ms for each batch. Make the pipeline faster (read "
            "and decode in several workers, as Grain's mp_prefetch and the num_workers of a DataLoader "
            "do; cache what fits in memory; send uint8 and convert on the device), or accept it. This "
            "is said once for each dataset.",
            self._elements,
            100 * self._waiting / passed,
            1000 * self._waiting / self._elements,
            1000 * passed / self._elements,
        )
