"""What a process reports: its status to its supervisor, its pulse to its watchdog, its exit codes.

The process maps the status file into its memory, so that writing is a store and no system call, and what
was written last outlives the process, however it ended. The layout: the turn (odd while a text is written),
the step, the time; then two texts that end with a zero byte. The pulse costs no more than an assignment;
the watchdog's thread reads it from time to time.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribute_jax._jax_private import is_ready
from distribute_jax.cluster_resolver._launched import STATUS

SIZE = 4096
_NUMBERS = struct.Struct("=qqd")
_TURN, _STEP, _UPDATED = range(3)
_PHASE = slice(64, 192)
_ERROR = slice(192, SIZE)
_NO_STEP = -1
_TRIES = 100

Listener = Callable[[int | None, str], None]
"""Called with the step and the phase after each change of one of them."""


@dataclass(frozen=True)
class Status:
    """What a process wrote last."""

    step: int | None
    """The last training step that it began; None before the first."""
    phase: str
    """What it is doing, such as ``"compiling"``; empty where it did not say."""
    error: str
    """The exception that ends it; empty where there is none."""
    updated: float
    """When it last wrote, on the clock of ``time.monotonic()``; 0.0 where it never did."""


class StatusWriter:
    """Writes this process's status.

    One thread at a time may write texts; numbers are stored whole.

    Args:
        path: the file, made where it is missing; None for a status that nobody reads.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if path is None else _mapped(path)
        whole = memoryview(self._memory)[: _NUMBERS.size]
        self._integers, self._times = whole.cast("q"), whole.cast("d")
        self._integers[_STEP] = _NO_STEP
        self._phase = ""
        self._listener: Listener | None = None
        self._is_told = False
        self._before = self._counted = 0

    def step(self, number: int) -> None:
        """Says which step begins; costs about a microsecond."""
        self._is_told = True
        self._write_step(number)

    def counted(self, number: int) -> None:
        """Says the same of a step that the library has counted, where nobody who knows better does."""
        self._counted = number
        if not self._is_told:
            self._write_step(self._before + number)

    def restored(self, number: int) -> None:
        """Says to which step the state went back; those that the library counts come behind it."""
        self._before = number - self._counted
        if not self._is_told:
            self._write_step(number)

    def _write_step(self, number: int) -> None:
        self._integers[_STEP] = number
        self._times[_UPDATED] = time.monotonic()
        if self._listener is not None:
            self._listener(number, self._phase)

    def phase(self, text: str) -> None:
        """Says what the process is doing now, in at most 120 bytes."""
        self._phase = text
        self._write(_PHASE, text)
        if self._listener is not None:
            step = self._integers[_STEP]
            self._listener(None if step == _NO_STEP else step, text)

    def error(self, text: str) -> None:
        """Says which exception ends the process; what is too long for the file is left out."""
        self._write(_ERROR, text)

    def listen(self, listener: Listener | None) -> None:
        """Has every later change of the step or the phase told to a function."""
        self._listener = listener

    def _write(self, field: slice, text: str) -> None:
        room = field.stop - field.start
        self._integers[_TURN] += 1
        self._memory[field] = text.encode()[: room - 1].ljust(room, b"\0")
        self._times[_UPDATED] = time.monotonic()
        self._integers[_TURN] += 1


def _mapped(path: str | os.PathLike[str]) -> mmap.mmap:
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        file.truncate(SIZE)
        return mmap.mmap(file.fileno(), SIZE)


def read_status(path: str | os.PathLike[str]) -> Status:
    """Reads what a process wrote last, while it writes or after it ended.

    Args:
        path: the file of the process; where it is missing, the process has said nothing.

    Returns:
        The status. A process that was killed while it wrote a text may leave half of it.
    """
    raw = b""
    for _ in range(_TRIES):
        raw = _bytes(path)
        turn = _NUMBERS.unpack_from(raw)[_TURN]
        if turn % 2 == 0 and _NUMBERS.unpack_from(_bytes(path))[_TURN] == turn:
            break
    _, step, updated = _NUMBERS.unpack_from(raw)
    never = updated == 0.0
    return Status(
        None if never or step == _NO_STEP else step, _text(raw[_PHASE]), _text(raw[_ERROR]), updated
    )


def _bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes().ljust(SIZE, b"\0")
    except FileNotFoundError:
        return bytes(SIZE)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


def own_status() -> StatusWriter:
    """Gives this process's writer; one that nobody reads where no supervisor started the process."""
    return _writer(os.environ.get(STATUS))


def report_step(step: int) -> None:
    """Says which training step begins, to the supervisor of this process.

    ``distribute-jax launch`` shows it when the process ends, and takes a step beyond all earlier ones for
    progress, so that it starts a failed job again; ``dj.testing.Fault`` waits for it. Where nothing
    supervises the process, nothing happens. It costs about a microsecond.

    A loop that does not call this is counted: each step that a strategy runs, behind the step that
    ``CheckpointManager.restore`` or ``restore_latest`` has put back.

    Args:
        step: the number of the step, counted over the whole training, restarts included.

    Example:
        >>> import distribute_jax as dj
        >>> for step in range(3):
        ...     dj.report_step(step)
    """
    own_status().step(step)


@functools.cache
def _writer(path: str | None) -> StatusWriter:
    try:
        return StatusWriter(path)
    except OSError:  # the variable outlived the job, as in a shell that the job started
        return StatusWriter(None)


SAVED = 42
"""All processes saved at one common step after a preemption: start them again, or leave for good."""

HUNG = 43
"""The watchdog ended this process, which made no progress."""

OTHER_FAILED = 44
"""This process is well, and ended because another one failed."""

PARTED = 45
"""The processes no longer do the same."""

MEANING = {
    SAVED: "saved after a preemption",
    HUNG: "made no progress and was ended by its watchdog",
    OTHER_FAILED: "ended because another process failed",
    PARTED: "no longer did the same as the others",
}
"""What the supervisor says of a process that ended with the code."""


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
