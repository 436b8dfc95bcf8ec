"""Reports what this process is doing: to its supervisor by the status file, and to its watchdog."""

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
"""The phase outside of this library, which has no time limit."""
COMPILING, RESTORING, SAVING = "compiling", "restoring", "saving"
"""Phases with a longer time limit."""

Listener = Callable[[int | None, str], None]
"""Called with the step and the phase after each change of one of them."""


class StatusWriter:
    """Writes this process's status to a file, or to memory; only one thread at a time may write texts."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if path is None else _map(path)
        self._steps = memoryview(self._memory)[:8].cast("q")
        self._steps[0] = 0
        self._phase = ""
        self._listener: Listener | None = None
        self._is_reported = False
        self._restored = self._counted = 0

    def step(self, number: int) -> None:
        """Reports a step that the program begins; takes about a microsecond."""
        self._is_reported = True
        self._write_step(number)

    def counted(self, number: int) -> None:
        """Reports the number of steps that the library has run, unless the program reports its steps."""
        self._counted = number
        if not self._is_reported:
            self._write_step(self._restored + number)

    def restored(self, number: int) -> None:
        """Reports the step of a restored checkpoint, from which the library goes on counting."""
        self._restored = number - self._counted
        if not self._is_reported:
            self._write_step(number)

    def _write_step(self, number: int) -> None:
        self._steps[0] = number + 1
        if self._listener is not None:
            self._listener(number, self._phase)

    def phase(self, text: str) -> None:
        """Reports what the process is doing, in at most 120 bytes."""
        self._phase = text
        self._write(PHASE, text)
        if self._listener is not None:
            self._listener(step_in(self._steps[0]), text)

    def error(self, text: str) -> None:
        """Reports the exception that ends the process; a text too long for the file is truncated."""
        self._write(ERROR, text)

    def listen(self, listener: Listener | None) -> None:
        self._listener = listener

    def _write(self, field: slice, text: str) -> None:
        room = field.stop - field.start
        self._memory[field] = text.encode(errors="replace")[: room - 1].ljust(room, b"\0")


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        # Not `truncate`: on a full disk, writing to the memory would then raise SIGBUS.
        file.write(bytes(SIZE - file.seek(0, os.SEEK_END)))
        file.flush()
        return mmap.mmap(file.fileno(), SIZE)


def status_writer() -> StatusWriter:
    """Returns this process's writer; without a supervisor it writes to memory that nobody reads."""
    return _writer(os.environ.get(STATUS))


@functools.cache
def _writer(path: str | None) -> StatusWriter:
    try:
        return StatusWriter(path)
    except OSError:  # the job is over, as in a shell that it started
        return StatusWriter(None)


def report_step(step: int) -> None:
    """Reports to the supervisor of this process which training step begins.

    ``distribute-jax launch`` shows it when the process ends, and counts a step beyond all earlier ones as
    progress, for which it restarts a failed job; ``dj.testing.Fault`` waits for it. Without a supervisor
    nothing happens. It takes about a microsecond.

    In a loop that does not call this, the library counts the steps that a strategy runs, starting from the
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
    """What this process is doing: plain attributes, which the watchdog's thread reads."""

    watched: bool = False
    """False if there is no watchdog, as in a job of one process."""
    step: int = 0
    phase: str = YOUR_CODE
    since: float = 0.0
    """When the phase began, by ``time.monotonic()``."""
    last: Any = None
    """An output of the last step, by which one sees whether it has finished."""
    dispatched: float = 0.0

    def waiting(self) -> tuple[str, float] | None:
        """Returns what the process waits for, and since when; None if it does not wait."""
        phase, since = self.phase, self.since
        if phase is not YOUR_CODE:
            return phase, since
        last, dispatched = self.last, self.dispatched
        try:
            if last is None or last.is_deleted() or last.is_ready():
                return None
        except RuntimeError:  # donated to the next step between the two calls
            return None
        return f"waiting for step {self.step}", dispatched


_activity = Activity()
_NOT_REPORTED = nullcontext()


def activity() -> Activity:
    return _activity


def doing(phase: str) -> AbstractContextManager[None]:
    """Reports what the main thread is doing during a ``with`` block."""
    if not _activity.watched or threading.current_thread() is not threading.main_thread():
        return _NOT_REPORTED
    return _reported(phase)


def calling(call: Callable[..., Any], *args: Any, phase: str) -> Any:
    """Calls a function, and reports what the main thread is doing meanwhile, as ``doing`` does.

    It is for what each step calls: without a supervisor or watchdog it costs no context manager.
    """
    if not _activity.watched:
        return call(*args)
    with doing(phase):
        return call(*args)


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
    """Reports that steps were dispatched; ``token`` is one of their outputs."""
    if not _activity.watched:
        return
    _activity.dispatched = time.monotonic()
    _activity.last = token
    _activity.step += steps
    status_writer().counted(_activity.step)
