"""The processes of one attempt on this machine: started, their output and exits read, stopped."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, BinaryIO, Self

from distribute_jax.launch import _attach

_AFTER_KILL = 10.0


class Group:
    """Starts programs together; on leaving the ``with`` block none of them is left.

    Args:
        programs: what to start.
        sinks: gives what takes the standard output and the standard error of each.
        ended: called with each child when it has ended, in a thread of its own.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        sinks: Callable[[Program], tuple[Sink, Sink]],
        ended: Callable[[Child], None],
    ) -> None:
        self.children: list[Child] = []
        try:
            for program in programs:
                self.children.append(Child(program, sinks(program), ended))
        except BaseException:
            self.end(grace=0)
            raise

    @property
    def running(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self.children if not child.has_ended.is_set()]

    def send(self, number: int) -> None:
        """Sends a signal to those that run."""
        for child in self.running:
            child.send(number)

    def wait(self, seconds: float) -> None:
        """Waits until all have ended, but not longer than the given time."""
        limit = time.monotonic() + seconds
        for child in self.children:
            child.has_ended.wait(max(0.0, limit - time.monotonic()))

    def end(self, grace: float) -> None:
        """Ends those that run: asks them with SIGTERM, and kills what is left after ``grace`` seconds."""
        if grace > 0:
            self.send(signal.SIGTERM)
            self.wait(grace)
        for child in self.running:
            child.kill()
        self.wait(_AFTER_KILL)

    def __enter__(self) -> Self:
        """Gives the group itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kills what still runs."""
        self.end(grace=0)


Sink = Callable[[bytes], None]
"""Takes what a process wrote, line by line as far as it writes lines; called in a thread of its own."""

_LINE = 1 << 16
_LAST_WORDS = 1.0


@dataclass(frozen=True)
class Program:
    """What is to be started."""

    index: int
    """Which process of the job it is, over all machines."""
    command: Sequence[str]
    """The path of an executable and its arguments."""
    environment: Mapping[str, str]
    status: Path
    """The status file that the environment names."""


class Child:
    """A running process that ends with its supervisor.

    Make it in a thread that outlives it: the kernel takes the end of that thread for the supervisor's.

    Args:
        program: what to start.
        sinks: what takes its standard output and its standard error.
        ended: called with the child in a thread of its own as soon as it has ended, its output is read,
            and nothing of its process group is left.
    """

    def __init__(
        self, program: Program, sinks: tuple[Sink, Sink], ended: Callable[[Child], None]
    ) -> None:
        self.program = program
        self.code: int | None = None
        """The exit code, or minus the number of a signal, once it has ended."""
        self.began = time.monotonic()
        self.seconds = 0.0
        """How long it ran, once it has ended."""
        self.has_ended = threading.Event()
        self._ended = ended
        self._reaping = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _attach.__file__, str(os.getpid()), *program.command],
            env=dict(program.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        streams = (self._process.stdout, self._process.stderr)
        self._pumps = [
            _in_background(_pump, stream, sink)
            for stream, sink in zip(streams, sinks, strict=True)
            if stream is not None
        ]
        _in_background(self._await)

    def send(self, number: int) -> None:
        """Sends a signal to the process; nothing happens where it has ended."""
        with self._reaping:
            if self.code is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and all that it started in its group."""
        with self._reaping:
            if self.code is None:
                self._kill_group()

    def _await(self) -> None:
        if hasattr(os, "waitid"):
            # Its number stays its own until it is reaped, so that the group's cannot be another's by now.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._reaping:
            self._kill_group()
            code = self._process.wait()
            self.seconds = time.monotonic() - self.began
            self.code = code
        for pump in self._pumps:
            pump.join(_LAST_WORDS)  # a daemon that left the group may hold the pipe for ever
        self.has_ended.set()
        self._ended(self)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self.pid, signal.SIGKILL)


def _in_background(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _pump(stream: IO[bytes], sink: Sink) -> None:
    with stream:
        while line := stream.readline(_LINE):
            sink(line)


_KEPT = 200
_TRACEBACK = "Traceback (most recent call last):"


class Printer:
    """Shows the lines of one stream of one process, and keeps the last ones.

    Args:
        process: its number, put in front of each line.
        stream: where to; where it is closed by its reader, lines are kept and not shown.
        lock: held while a line is written, so that lines of several processes do not mix.
    """

    def __init__(self, process: int, stream: BinaryIO, lock: threading.Lock) -> None:
        self._prefix = f"[{process}] ".encode()
        self._stream = stream
        self._lock = lock
        self._kept: deque[bytes] = deque(maxlen=_KEPT)

    def __call__(self, line: bytes) -> None:
        """Takes a line."""
        self._kept.append(line)
        ended = line if line.endswith(b"\n") else line + b"\n"
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(self._prefix + ended)
            self._stream.flush()

    @property
    def last_lines(self) -> list[str]:
        """The last lines, without their ends."""
        return [line.decode(errors="replace").rstrip() for line in self._kept]


def last_words(lines: Sequence[str]) -> str:
    """Gives the exception that a process ended with, from what it wrote to its standard error.

    Returns:
        The first line of the last traceback's exception, such as ``"ValueError: bad batch"``; the last
        line where there is no traceback, as for a script that is not there; empty where nothing was written.
    """
    for start in reversed(range(len(lines))):
        if lines[start].startswith(_TRACEBACK):
            after = (
                line for line in lines[start + 1 :] if line and not line.startswith((" ", "\t"))
            )
            return next(after, "")
    return next((line for line in reversed(lines) if line.strip()), "")


_FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone
}


@dataclass(frozen=True)
class Told:
    """This supervisor was told to end."""

    number: int
    """The signal to pass on."""


@dataclass(frozen=True)
class PeerFailed:
    """A process on another machine has failed."""

    attempt: int


@dataclass(frozen=True)
class PeerLost:
    """The supervisor of another machine is gone."""

    text: str


Event = Child | Told | PeerFailed | PeerLost


class Inbox:
    """Takes events from threads and signal handlers; one thread reads them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.told: int | None = None
        """The first signal that asked for an end."""

    def put(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Told) and self.told is None:
            self.told = event.number
        self._events.put(event)

    def get(self, seconds: float) -> Event | None:
        """Gives the next event; None where there is none within the time."""
        try:
            return self._events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def pause(self, seconds: float) -> None:
        """Waits between two attempts; not for a supervisor that is told to end, or has lost another one."""
        deadline = time.monotonic() + seconds
        while self.told is None and (left := deadline - time.monotonic()) > 0:
            event = self.get(left)
            if isinstance(event, PeerLost):
                self.put(event)
                return


@contextmanager
def signals_into(inbox: Inbox) -> Iterator[None]:
    """Puts the signals that ask for an end into the inbox, for as long as the block lasts."""

    def put(number: int, frame: FrameType | None) -> None:
        inbox.put(Told(_FORWARDED[signal.Signals(number)]))

    before = {number: signal.signal(number, put) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
