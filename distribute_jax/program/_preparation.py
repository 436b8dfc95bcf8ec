"""The time of what is done once for a program: compiling it, comparing it, checking its padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class PreparationClock:
    """Adds up these seconds in the blocks of ``counting``; ``wait`` waits for the steps before."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._wait = wait
        self._runs = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is prepared in the block."""
        token = _clock.set(self)
        try:
            yield
        finally:
            _clock.reset(token)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the block, once if it is inside of another one."""
        if self._runs:
            yield
            return
        self._wait()  # so that what the devices still had to do is not counted
        self._runs, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._runs = False
            self.seconds += time.perf_counter() - start


_clock: ContextVar[PreparationClock | None] = ContextVar("distribute_jax_clock", default=None)


@contextmanager
def preparing() -> Iterator[None]:
    """Marks what is done once for a program, for the clock that counts it."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    with clock.running():
        yield
