"""Starts the processes of a job, watches them, and restarts all of them as long as they make progress."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from distribute_jax import _supervision
from distribute_jax._errors import ClusterError
from distribute_jax._supervision import OTHER_FAILED, SAVED, pool_threads, read_status, xla_flags
from distribute_jax.launch._process import (
    ChildProcess,
    Guard,
    Printer,
    ProcessGroup,
    ProcessSpec,
    Sink,
    last_error,
)
from distribute_jax.launch._verdict import (
    AttemptOutcome,
    ProcessFailure,
    Progress,
    decide,
    is_same_program_error,
)

CACHE = "JAX_COMPILATION_CACHE_DIR"
PREFIX = "distribute-jax-"
"""Prefix of the temporary folder of a job."""

_FAILURE_GRACE_SECONDS = 1.0
"""How long the others have to end by themselves; without the process that failed they cannot save."""
_MAX_SAME_ERROR_SECONDS = 10.0
"""How long, at most, to wait whether the others fail with the same error, so that a restart is useless."""
_LOOPBACK = "127.0.0.1"
_PORTS = range(10_000, 32_768)
_DAY_SECONDS = 86400.0
_REJOIN_POLL_SECONDS = 1.0
_REPORT_SECONDS = 1.0
"""How long after the grace period a process that could not save may report that."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the job to save and stop; SIGHUP means that the terminal was closed."""


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    processes: int,
    min_processes: int,
    rejoin: float,
    devices: int | None,
    max_restarts: int,
    max_pause: float,
    grace: float,
) -> int:
    """Runs a job to its end and returns its exit code, 42 if all saved; the options are those of launch."""
    progress, inbox = Progress(), Inbox()
    name = secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        signals_into(inbox),
        Guard(f"{_supervision.JOB}={name}", folder) as guard,
    ):
        job = LocalJob(processes, devices, command, environment, Path(folder), name)
        order, used = list(range(processes)), processes  # the last to fail comes last
        while True:
            places = sorted(order[:used])
            if inbox.stop_signal is None:
                seconds = rejoin if used < processes else float("inf")
                outcome = Attempt(job, places, progress, inbox, grace, seconds).run()
                guard.end_all()
            else:  # stopped during the pause
                outcome = AttemptOutcome(stop_signal=inbox.stop_signal)
            verdict = decide(outcome, progress, max_restarts, max_pause)
            if verdict.text:
                say(verdict.text)
            if verdict.exit_code is not None:
                return verdict.exit_code
            if outcome.failure is not None:
                order.append(order.pop(order.index(places[outcome.failure.process])))
            used = processes if outcome.failure is None else max(min_processes, used - 1)
            if used != len(places):
                say(f"continuing with {used} of {processes} processes")
            inbox.pause(verdict.pause)
            progress = verdict.progress


def say(text: str) -> None:
    with suppress(OSError):  # it may be closed
        os.write(2, f"distribute-jax: {text}\n".encode())


class Inbox:
    """A queue of ended processes, from threads, and signals, from handlers; one thread reads it."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ChildProcess | signal.Signals] = queue.SimpleQueue()
        self.stop_signal: signal.Signals | None = None
        """The first signal that asked the supervisor to stop."""

    def put(self, event: ChildProcess | signal.Signals) -> None:
        if isinstance(event, signal.Signals) and self.stop_signal is None:
            self.stop_signal = event
        self._events.put(event)

    def get(self, seconds: float) -> ChildProcess | signal.Signals | None:
        """Returns the next event; None after the timeout."""
        with suppress(queue.Empty):
            return self._events.get(timeout=max(0.0, seconds))
        return None

    def is_stopped(self) -> bool:
        return self.stop_signal is not None

    def pause(self, seconds: float) -> None:
        """Waits between two attempts, or until the supervisor is asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.is_stopped() and (left := deadline - time.monotonic()) > 0:
            self.get(left)


@contextmanager
def signals_into(inbox: Inbox) -> Iterator[None]:

    def put(number: int, frame: FrameType | None) -> None:
        inbox.put(signal.Signals(number))

    stops = {*_STOP_SIGNALS}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup sets it
        stops.remove(signal.SIGHUP)
    before: dict[signal.Signals, Any] = {n: signal.signal(n, put) for n in stops}
    # If a parent has set it to be ignored, exit codes are lost.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Attempt:
    """Starts the processes of a job, waits for them, and decides when to stop the remaining ones.

    After ``rejoin`` seconds, as soon as there is progress, they are asked to save and exit.
    """

    def __init__(
        self,
        job: LocalJob,
        places: Sequence[int],
        progress: Progress,
        inbox: Inbox,
        grace: float,
        rejoin: float,
    ) -> None:
        self._inbox, self._grace, self._progress = inbox, grace, progress
        self._rejoin_at, self._rejoins = time.monotonic() + rejoin, False
        job = replace(job, processes=len(places), address=free_address())
        self._specs = [
            job.process(i, progress.attempt, {_supervision.LOCAL_PROCESS_ID: str(place)})
            for i, place in enumerate(places)
        ]
        self._lock = threading.Lock()
        self._errors = [Printer(i, sys.stderr, self._lock) for i in range(job.processes)]
        self._failures: list[ProcessFailure] = []
        self._stop_signal: int | None = None
        self._limit = float("inf")

    def run(self) -> AttemptOutcome:
        """Waits until all processes have ended, and returns the outcome."""
        inbox = self._inbox
        with ProcessGroup(self._specs, self._sinks, inbox.put, inbox.is_stopped) as group:
            while group.running and (left := self._limit - time.monotonic()) > 0:
                until_rejoin = self._rejoin_at - time.monotonic()
                self._handle(group, inbox.get(min(left, until_rejoin, _DAY_SECONDS)))
                if time.monotonic() >= self._rejoin_at:
                    self._rejoin(group)
            while (event := inbox.get(0)) is not None:
                self._handle(group, event)
            killed = [] if self._stop_signal is None else group.running
            group.stop(grace=_FAILURE_GRACE_SECONDS if self._stop_signal is None else 0)
        codes = [child.code for child in group.children]
        causes = [failure for failure in self._failures if failure.code != OTHER_FAILED]
        return AttemptOutcome(
            failure=next(iter(causes or self._failures), None),
            best_step=_best_step(group),
            all_saved=codes.count(SAVED) == len(self._specs),
            any_saved=SAVED in codes,
            same_error_for_all=len(causes) == len(codes) and is_same_program_error(causes),
            rejoins=self._rejoins and any(codes),
            stop_signal=self._stop_signal,
            killed=tuple(child.spec.index for child in killed),
        )

    def _sinks(self, spec: ProcessSpec) -> tuple[Sink, Sink]:
        return Printer(spec.index, sys.stdout, self._lock), self._errors[spec.index]

    def _handle(self, group: ProcessGroup, event: ChildProcess | signal.Signals | None) -> None:
        if isinstance(event, signal.Signals):
            if self._stop_signal is None:
                group.send(signal.SIGTERM)  # SIGINT would be an exception, and nothing saved
                self._end_within(self._grace + _REPORT_SECONDS)
                self._stop_signal = event
            else:
                self._end_within(0)
        elif event is None or event not in group.children:
            return
        elif event.code == SAVED:
            self._end_within(self._grace)
        elif event.code and self._stop_signal is None and not self._rejoins:
            self._failures.append(failure := self._failure(event, event.code))
            # A process that ended because of another one may be noticed first.
            seconds = _FAILURE_GRACE_SECONDS if event.code == OTHER_FAILED else 0
            if is_same_program_error([failure]) and not (
                _best_step(group) or self._progress.best_step
            ):
                seconds = min(max(_FAILURE_GRACE_SECONDS, event.seconds), _MAX_SAME_ERROR_SECONDS)
            self._end_within(seconds)

    def _rejoin(self, group: ProcessGroup) -> None:
        self._rejoin_at += _REJOIN_POLL_SECONDS
        best, before = _best_step(group), self._progress.best_step
        if best is not None and (before is None or best > before) and self._stop_signal is None:
            self._rejoins, self._rejoin_at = True, float("inf")
            group.send(signal.SIGTERM)
            self._end_within(self._grace + _REPORT_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self._limit = min(self._limit, time.monotonic() + seconds)

    def _failure(self, child: ChildProcess, code: int) -> ProcessFailure:
        index = child.spec.index
        status = read_status(child.spec.status)
        return ProcessFailure(
            process=index,
            pid=child.pid,
            host=socket.gethostname(),
            code=code,
            error=status.error
            or last_error(self._errors[index].last_lines, has_begun=status.step is not None),
            step=status.step,
            phase=status.phase,
        )


def _best_step(group: ProcessGroup) -> int | None:
    steps = [read_status(child.spec.status).step for child in group.children]
    return max((step for step in steps if step is not None), default=None)


def free_address() -> str:
    """Returns an address of this machine, with a port that systems give to no outgoing connection."""
    while True:
        port = secrets.choice(_PORTS)
        with suppress(OSError), socket.create_server((_LOOPBACK, port)):  # if nobody listens there
            return f"{_LOOPBACK}:{port}"


@dataclass(frozen=True)
class LocalJob:
    """A job whose processes are all on this machine."""

    processes: int
    devices: int | None
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    """A temporary folder of this job."""
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    address: str = field(default_factory=free_address)
    """Where process 0 listens."""

    def process(
        self, index: int, attempt: int, changes: Mapping[str, str] | None = None
    ) -> ProcessSpec:
        """Returns one process of an attempt.

        Its environment is that of the job and the variables of the process, overridden by ``changes``, but
        the flags of the job are added to those of XLA.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)  # temporary files of a long job may be removed
        status = self.folder / f"status-{attempt}-{index}"
        base = {"PYTHONUNBUFFERED": "1", **self.environment, **(changes or {})}
        environment = {name: value for name, value in base.items() if name != "TF_CONFIG"}
        if self.devices:
            environment |= _simulated(self.devices, base)
            environment.pop("JAX_NUM_CPU_DEVICES", None)  # it would override the flag
        environment |= {
            _supervision.NUM_PROCESSES: str(self.processes),
            _supervision.PROCESS_ID: str(index),
            _supervision.LOCAL_PROCESS_ID: str(index),
            _supervision.JOB: self.name,
            _supervision.ATTEMPT: str(attempt),
            _supervision.ADDRESS: self.address,
            _supervision.JOB_FOLDER: str(self.folder),
            _supervision.STATUS: str(status),
        }
        environment |= {k: v for k, v in (changes or {}).items() if k != "XLA_FLAGS"}
        return ProcessSpec(index, self.command, environment, status)


def _simulated(devices: int, base: Mapping[str, str]) -> dict[str, str]:
    count = f"--xla_force_host_platform_device_count={devices}"
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*xla_flags(base), count]),
        "NPROC": pool_threads(devices, base),
    }


def cache_folder(environment: Mapping[str, str]) -> str:
    """Returns JAX's folder for compiled programs, by default one that only this user can write to."""
    if CACHE in environment:
        set_folder = environment[CACHE]
        with suppress(OSError):  # not created yet, or the URL of a bucket
            if set_folder and Path(set_folder).stat().st_mode & stat.S_IWOTH:
                raise ClusterError(
                    f"{CACHE} is {set_folder}, which every user of this machine can write to, and JAX runs "
                    f"what is in it. Remove that permission (chmod o-w {set_folder}), or name another one."
                )
        return set_folder
    above = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(above) / "distribute_jax" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        reason = "" if folder.stat().st_uid == os.getuid() else "it is another user's"
    except OSError as error:
        reason = str(error)
    if reason:
        raise ClusterError(
            f"distribute-jax launch cannot cache compiled programs in {folder}: {reason}. Set {CACHE} to a "
            "folder that only you can write to, or to an empty string to compile at every start."
        )
    return str(folder)
