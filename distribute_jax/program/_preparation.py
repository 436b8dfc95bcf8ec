"""Measures the time of what is done once for a program: compiling, comparing, checking padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar


class PreparationClock:
    """Adds up the seconds of preparation; ``wait`` waits for the steps that were dispatched before."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._wait = wait
        self._runs = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Makes this the clock of the block."""
        token = _clock.set(self)
        try:
            yield
        finally:
            _clock.reset(token)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures the block, unless it is inside another such block."""
        if self._runs:
            yield
            return
        self._wait()  # the time of earlier steps is not preparation
        self._runs, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._runs = False
            self.seconds += time.perf_counter() - start


_clock: ContextVar[PreparationClock | None] = ContextVar("distribute_jax_clock", default=None)


@contextmanager
def preparing() -> Iterator[None]:
    """Marks work that is done once for a program, for the current clock."""
    clock = _clock.get()
    with nullcontext() if clock is None else clock.running():
        yield
