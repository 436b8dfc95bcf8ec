"""Where this process is: the step it runs and what it waits for, so that a hang can be told from work.

Nothing here is more than an assignment; the watchdog's thread reads it from time to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from distribute_jax._internals import is_ready
from distribute_jax.cluster._status import own_status

YOUR_CODE = "in your code"
"""What a process does outside of this library; it may take as long as it likes."""

COMPILING, RESTORING = "compiling", "restoring"
"""What takes long without anybody being stuck."""


@dataclass
class Pulse:
    """What this process does now."""

    watched: bool = False
    """Whether anybody looks; a process that is alone is not watched."""
    step: int = 0
    """Steps that were dispatched so far."""
    phase: str = YOUR_CODE
    """What it does."""
    since: float = 0.0
    """When the phase began, in seconds of ``time.monotonic``."""
    last: Any = None
    """An array that the last step computes, and by which one sees whether it is done."""
    dispatched: float = 0.0
    """When the last step was dispatched."""

    def waits(self) -> tuple[str, float] | None:
        """Says what the process waits for and since when; None where it waits for nothing."""
        phase, since = self.phase, self.since
        if phase is not YOUR_CODE:
            return phase, since
        last, dispatched = self.last, self.dispatched
        if last is None or last.is_deleted() or is_ready(last):
            return None
        return f"waiting for step {self.step}", dispatched


_pulse = Pulse()


def pulse() -> Pulse:
    """Gives the pulse of this process."""
    return _pulse


def doing(phase: str) -> AbstractContextManager[None]:
    """Reports what this process does during a ``with`` block; threads other than the main one do not."""
    if not _pulse.watched or threading.current_thread() is not threading.main_thread():
        return _NOT_REPORTED
    return _reported(phase)


_NOT_REPORTED = nullcontext()


@contextmanager
def _reported(phase: str) -> Iterator[None]:
    before = _pulse.phase, _pulse.since
    _pulse.since = time.monotonic()
    _pulse.phase = phase
    own_status().phase(phase)
    try:
        yield
    finally:
        _pulse.phase, _pulse.since = before
        own_status().phase("" if before[0] is YOUR_CODE else before[0])


def stepped(steps: int, token: Any) -> None:
    """Notes that steps were dispatched; ``token`` is an array that they compute."""
    if not _pulse.watched:
        return
    _pulse.dispatched = time.monotonic()
    _pulse.last = token
    _pulse.step += steps
    own_status().counted(_pulse.step)
