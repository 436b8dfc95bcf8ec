"""What this process reports: a status file for its supervisor, its activity for the watchdog."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from distribute_jax._supervision import ERROR, PHASE, SIZE, STATUS, step_in

YOUR_CODE = "in your code"
"""The phase of a process outside of this library; it may take any time."""
COMPILING, RESTORING = "compiling", "restoring"
"""Phases that take long although nothing hangs."""

Listener = Callable[[int | None, str], None]
"""Called with the step and the phase after each change of one of them."""


class StatusWriter:
    """Writes this process's status to a file, or nowhere; one thread at a time may write texts."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if path is None else _map(path)
        self._steps = memoryview(self._memory)[:8].cast("q")
        self._steps[0] = 0
        self._phase = ""
        self._listener: Listener | None = None
        self._is_reported = False
        self._restored = self._counted = 0

    def step(self, number: int) -> None:
        """Reports a step that begins; takes about a microsecond."""
        self._is_reported = True
        self._write_step(number)

    def counted(self, number: int) -> None:
        """Reports a step that the library has counted, unless the program reports its steps."""
        self._counted = number
        if not self._is_reported:
            self._write_step(self._restored + number)

    def restored(self, number: int) -> None:
        """Reports the step of a restored state; those that the library counts are added to it."""
        self._restored = number - self._counted
        if not self._is_reported:
            self._write_step(number)

    def _write_step(self, number: int) -> None:
        self._steps[0] = number + 1
        if self._listener is not None:
            self._listener(number, self._phase)

    def phase(self, text: str) -> None:
        """Reports what the process is doing now, in at most 120 bytes."""
        self._phase = text
        self._write(PHASE, text)
        if self._listener is not None:
            self._listener(step_in(self._steps[0]), text)

    def error(self, text: str) -> None:
        """Reports the exception that ends the process; what is too long for the file is left out."""
        self._write(ERROR, text)

    def listen(self, listener: Listener | None) -> None:
        """Calls a function after every later change of the step or the phase."""
        self._listener = listener

    def _write(self, field: slice, text: str) -> None:
        room = field.stop - field.start
        self._memory[field] = text.encode()[: room - 1].ljust(room, b"\0")


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        # Not `truncate`: where the disk is full, the kernel ends who then writes to the memory.
        file.write(bytes(SIZE - file.seek(0, os.SEEK_END)))
        file.flush()
        return mmap.mmap(file.fileno(), SIZE)


def status_writer() -> StatusWriter:
    """Returns this process's writer; nobody reads its status where no supervisor started the process."""
    return _writer(os.environ.get(STATUS))


@functools.cache
def _writer(path: str | None) -> StatusWriter:
    try:
        return StatusWriter(path)
    except OSError:  # the variable outlived the job, as in a shell that the job started
        return StatusWriter(None)


def report_step(step: int) -> None:
    """Reports which training step begins to the supervisor of this process.

    ``distribute-jax launch`` shows it when the process ends, and counts a step beyond all earlier ones as
    progress, for which it restarts a failed job; ``dj.testing.Fault`` waits for it. Where nothing
    supervises the process, nothing happens. It takes about a microsecond.

    In a loop that does not call this, steps are counted: each one that a strategy runs, starting from the
    step that ``CheckpointManager.restore`` or ``restore_latest`` has restored.

    Args:
        step: the number of the step, counted over the whole training, restarts included.

    Example:
        >>> import distribute_jax as dj
        >>> for step in range(3):
        ...     dj.report_step(step)
    """
    status_writer().step(step)


@dataclass
class Activity:
    """What this process is doing; writing it is an assignment, and the watchdog's thread reads it."""

    watched: bool = False
    """False where nobody reads it: in a process that is alone."""
    step: int = 0
    """How many steps were dispatched."""
    phase: str = YOUR_CODE
    since: float = 0.0
    """When the phase began, on the clock of ``time.monotonic()``."""
    last: Any = None
    """An array that the last step computes: once it is ready, the step is done."""
    dispatched: float = 0.0
    """When the last step was dispatched."""

    def waiting(self) -> tuple[str, float] | None:
        """Returns what the process waits for and since when; None where it waits for nothing."""
        phase, since = self.phase, self.since
        if phase is not YOUR_CODE:
            return phase, since
        last, dispatched = self.last, self.dispatched
        if last is None or last.is_deleted() or last.is_ready():
            return None
        return f"waiting for step {self.step}", dispatched


_activity = Activity()
_NOT_REPORTED = nullcontext()


def activity() -> Activity:
    """Returns the activity of this process."""
    return _activity


def doing(phase: str) -> AbstractContextManager[None]:
    """Reports what the main thread does during a ``with`` block."""
    if not _activity.watched or threading.current_thread() is not threading.main_thread():
        return _NOT_REPORTED
    return _reported(phase)


@contextmanager
def _reported(phase: str) -> Iterator[None]:
    before = _activity.phase, _activity.since
    try:
        _activity.since = time.monotonic()
        _activity.phase = phase
        status_writer().phase(phase)
        yield
    finally:
        _activity.phase, _activity.since = before
        status_writer().phase("" if before[0] is YOUR_CODE else before[0])


def stepped(steps: int, token: Any) -> None:
    """Reports that steps were dispatched; ``token`` is an array that they compute."""
    if not _activity.watched:
        return
    _activity.dispatched = time.monotonic()
    _activity.last = token
    _activity.step += steps
    status_writer().counted(_activity.step)
