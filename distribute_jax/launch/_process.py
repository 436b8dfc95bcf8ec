"""Starts and stops the processes of one attempt, and reads their output and exit codes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TextIO

from distribute_jax._errors import ClusterError
from distribute_jax._supervision import ENDED

Sink = Callable[[bytes], None]
"""Called in a separate thread with each line that a process writes."""

_KILL_SECONDS = 10.0
_MAX_LINE_BYTES = 1 << 16
_DRAIN_SECONDS = 1.0
_MAX_KEPT_LINES = 200
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = re.compile(r"F\d{4} [^\]]*\] (.+)|(Fatal Python error: .+|Timeout \(.+\)!)")
"""What faulthandler and Abseil's log write when they end a process."""
_NOT_A_REASON = re.compile(r"\s|$|(DEBUG|INFO|WARNING)\b|[IWE]\d{4} |.*Warning: ")
_TIE_TO_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, which lasts through exec
if os.getppid() != int(sys.argv[1]):  # the supervisor was gone before the kernel was asked
    os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Ties a process to its supervisor, and then becomes the program.

When the supervisor ends, in whatever way, the kernel kills the process, even if it is stopped or hangs in C
code. Only Linux supports this; elsewhere a supervisor that is killed leaves its processes behind.
"""

_GUARD = """
import os, shutil, signal, sys, time

variable, folder = b"\\0" + sys.argv[1].encode() + b"\\0", sys.argv[2]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

def is_of_the_job(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return variable in b"\\0" + file.read()
    except OSError:  # it has ended, or is another user's
        return False

def end_all():
    limit = time.monotonic() + 5
    while os.path.isdir("/proc") and time.monotonic() < limit:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if not (left := [pid for pid in pids if is_of_the_job(pid)]):
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.01)

for line in sys.stdin.buffer:
    end_all()
    os.write(0, line)
end_all()  # the supervisor has ended, or was killed
shutil.rmtree(folder, ignore_errors=True)
"""


class Guard:
    """A small process that kills whatever the processes of a job have started, in any session.

    It outlives a supervisor that is killed, and then kills all processes of the job and removes its folder.
    It finds them by a variable in their environment, as shown by ``/proc``: on Linux only, and not if a
    process has removed the variable or overwritten its environment.
    """

    def __init__(self, variable: str, folder: str) -> None:
        self._end, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, variable, folder],
                stdin=other.fileno(),
                start_new_session=True,
            )

    def end_all(self) -> None:
        with suppress(OSError):  # the guard was killed
            self._end.sendall(b"\n")
            self._end.recv(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()
        self._process.wait()


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start."""

    index: int
    """The index of the process in the job."""
    command: Sequence[str]
    """The path of an executable, and its arguments."""
    environment: Mapping[str, str]
    status: Path


class ProcessGroup:
    """Starts processes together, and kills those that are left at the end of the ``with`` block."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        sinks: Callable[[ProcessSpec], tuple[Sink, Sink]],
        on_exit: Callable[[ChildProcess], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.children: list[ChildProcess] = []
        try:
            for spec in specs:
                if is_stopped():
                    break
                self.children.append(ChildProcess(spec, sinks(spec), on_exit))
        except BaseException as error:
            self.stop(grace=0)
            # No descriptor, process or thread is left.
            if isinstance(error, (OSError, RuntimeError)):
                raise ClusterError(
                    f"Process {len(self.children)} of {len(specs)} could not be started: {error}. Start "
                    "fewer processes, or raise the limit: ulimit -n for open files, -u for processes and "
                    "threads, -v for memory."
                ) from error
            raise

    @property
    def running(self) -> list[ChildProcess]:
        return [child for child in self.children if not child.has_ended.is_set()]

    def send(self, number: int) -> None:
        for child in self.running:
            child.send(number)

    def wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for child in self.children:
            child.has_ended.wait(max(0.0, limit - time.monotonic()))

    def stop(self, grace: float) -> None:
        """Stops running processes with SIGTERM, and after ``grace`` seconds with SIGKILL."""
        if grace > 0:
            self.send(signal.SIGTERM)
            self.wait(grace)
        for child in self.running:
            child.kill()
        self.wait(_KILL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(grace=0)


class ChildProcess:
    """A running process, which is killed when its supervisor ends.

    Start it in a thread that outlives it: to the kernel, the end of that thread is the supervisor's. It has
    ended once its output is read and its process group is empty.
    """

    def __init__(
        self, spec: ProcessSpec, sinks: tuple[Sink, Sink], on_exit: Callable[[ChildProcess], None]
    ) -> None:
        self.spec = spec
        self.code: int | None = None
        """Once it has ended, the exit code, or minus the number of a signal."""
        self.seconds = 0.0
        self.has_ended = threading.Event()
        self._start = time.monotonic()
        self._on_exit = on_exit
        self._reaping = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid()), *spec.command],
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._readers = [
            _in_background(_read, stream, sink)
            for stream, sink in zip(
                (self._process.stdout, self._process.stderr), sinks, strict=True
            )
        ]
        _in_background(self._wait)

    def send(self, number: int) -> None:
        with self._reaping:
            if self.code is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and the rest of its process group."""
        with self._reaping:
            if self.code is None:
                self._kill_group()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # Until it is reaped, its pid and process group cannot be reused.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._reaping:
            self._kill_group()
            code = self._process.wait()
            self.seconds = time.monotonic() - self._start
            self.code = code
        if not code:
            with suppress(OSError):  # the folder of the job is gone
                self.spec.status.with_suffix(ENDED).touch()
        for reader in self._readers:
            reader.join(_DRAIN_SECONDS)  # a daemon that left the group may hold the pipe forever
        self.has_ended.set()
        self._on_exit(self)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self.pid, signal.SIGKILL)


def _in_background(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _read(stream: IO[bytes], sink: Sink) -> None:
    with stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            sink(line)


class Printer:
    """Prints the lines of one stream of a process with its index, and keeps the last ones."""

    def __init__(self, process: int, stream: TextIO | None, lock: threading.Lock) -> None:
        self._prefix = f"[{process}] ".encode()
        self._stream = None if stream is None else stream.buffer  # None where the shell closed it
        self._lock = lock
        self._lines: deque[bytes] = deque(maxlen=_MAX_KEPT_LINES)

    def __call__(self, line: bytes) -> None:
        if line.startswith(b"[Gloo] Rank "):  # C++ prints in each process that it is connected
            return
        self._lines.append(line)
        if self._stream is None:
            return
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(self._prefix + line.removesuffix(b"\n") + b"\n")
            self._stream.flush()

    @property
    def last_lines(self) -> list[str]:
        return [line.decode(errors="replace").rstrip() for line in self._lines]


def _is_indented(line: str) -> bool:
    return line[:1] in (" ", "\t", "")


def last_error(lines: Sequence[str], *, has_begun: bool = False) -> str:
    """Returns why a process failed, from the last lines of its standard error.

    That is the first line of the last exception, such as ``"ValueError: bad batch"``, with the indented ones
    below it; or the message of C code that ended the process. Without either it is the last line, unless that
    is a warning, if the process has not begun its steps, as with a script that does not exist; afterwards an
    ordinary line is not the reason.
    """
    for start in reversed(range(len(lines))):
        if lines[start].startswith(_TRACEBACK):
            after = lines[start + 1 :]
            first, *others = *itertools.dropwhile(_is_indented, after), ""
            return "\n".join([first, *itertools.takewhile(_is_indented, others)]).rstrip()
        if fatal := _FATAL.match(lines[start]):
            return fatal[1] or fatal[2]
    return next((x for x in reversed(lines) if not has_begun and not _NOT_A_REASON.match(x)), "")
