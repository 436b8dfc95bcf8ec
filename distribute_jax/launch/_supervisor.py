"""Starts the processes of a job, watches them, and restarts all of them while that makes progress."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver import _launched
from distribute_jax.cluster_resolver._launched import coordinator_file
from distribute_jax.launch._machines import Machines
from distribute_jax.launch._process import (
    Child,
    Event,
    Group,
    Inbox,
    PeerFailed,
    PeerLost,
    Printer,
    Program,
    Sink,
    Told,
    last_words,
    signals_into,
)
from distribute_jax.launch._verdict import Death, Outcome, Progress, decide
from distribute_jax.processes._status import OTHER_FAILED, SAVED, read_status


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be launched on this machine."""

    command: Sequence[str]
    """The path of an executable and its arguments."""
    here: range
    """The numbers of the processes of this machine."""
    processes: int
    """How many there are on all machines."""
    devices: int | None
    """How many simulated CPU devices each has; None for those that JAX finds."""
    host: str
    """Where process 0 listens."""
    max_restarts: int
    """How many restarts in a row may bring no progress."""
    longest_pause: float
    """How many seconds a pause before a restart lasts at most."""
    grace: float
    """How many seconds the processes have to save after a signal."""
    environment: Mapping[str, str]
    """That of every process, before the job adds its own."""


def supervise(launch: Launch, machines: Machines, inbox: Inbox) -> int:
    """Runs a job to its end.

    Args:
        launch: what to run.
        machines: the other machines.
        inbox: where events of the other machines come in.

    Returns:
        The exit code: 0, that of the process that failed, 42 where all have saved and this supervisor was
        told to end, or 128 and the number of the signal.

    Raises:
        ClusterError: another machine did not come, or is gone; nothing of the job is left here.
    """
    progress = Progress()
    with private_folder() as meeting, signals_into(inbox):
        job = Job(
            processes=launch.processes,
            here=launch.here,
            devices=launch.devices,
            meeting=meeting,
            host=launch.host,
            nonce=machines.nonce,
        )
        while True:
            coordinator = coordinator_file(meeting, progress.attempt)
            told = machines.begin(progress.attempt, coordinator, inbox.told)
            if told is None:
                outcome = _attempt(job, launch, progress.attempt, machines, inbox)
            else:
                outcome = Outcome(told=told)
            outcomes = machines.agree(progress.attempt, outcome)
            verdict = decide(outcomes, progress, launch.max_restarts, launch.longest_pause)
            if verdict.text:
                say(verdict.text)
            if verdict.exit_code is not None:
                machines.close()
                return verdict.exit_code
            inbox.pause(verdict.pause)
            progress = verdict.progress


def _attempt(job: Job, launch: Launch, number: int, machines: Machines, inbox: Inbox) -> Outcome:
    programs = [job.program(i, number, launch.command, launch.environment) for i in launch.here]
    lock = threading.Lock()
    errors = {p.index: Printer(p.index, sys.stderr.buffer, lock) for p in programs}

    def sinks(program: Program) -> tuple[Sink, Sink]:
        return Printer(program.index, sys.stdout.buffer, lock), errors[program.index]

    def words(process: int) -> Sequence[str]:
        return errors[process].last_lines

    failed = partial(machines.failed, number)
    with Group(programs, sinks, inbox.put) as group:
        attempt = Attempt(number, group, inbox, grace=launch.grace, on_failure=failed, words=words)
        return attempt.run()


def say(text: str) -> None:
    """Prints one line of the supervisor's own."""
    with suppress(OSError):  # nobody reads it
        os.write(2, f"distribute-jax: {text}\n".encode())


AFTER_A_DEATH = 1.0
"""How many seconds the others have to end by themselves: without the one that failed they cannot save."""

_LONG = 86400.0


class Attempt:
    """Waits for the processes of a group, and decides when the rest of them is ended.

    Args:
        number: which attempt it is.
        group: the processes.
        inbox: where they say that they have ended, and others what happened elsewhere.
        grace: how many seconds the processes have to save after a signal.
        on_failure: called when the first process here has failed.
        words: gives the last lines that a process wrote to its standard error.
    """

    def __init__(
        self,
        number: int,
        group: Group,
        inbox: Inbox,
        *,
        grace: float,
        on_failure: Callable[[], None],
        words: Callable[[int], Sequence[str]],
    ) -> None:
        self._number = number
        self._group = group
        self._inbox = inbox
        self._grace = grace
        self._on_failure = on_failure
        self._words = words
        self._deaths: list[Death] = []
        self._told: int | None = None
        self._lost = ""
        self._killed: list[int] = []
        self._limit = float("inf")

    def run(self) -> Outcome:
        """Waits until nothing of the group is left.

        Returns:
            How it ended.

        Raises:
            ClusterError: the supervisor of another machine is gone.
        """
        while self._group.running and (left := self._limit - time.monotonic()) > 0:
            self._take(self._inbox.get(min(left, _LONG)))
        while (event := self._inbox.get(0)) is not None:
            self._take(event)
        if self._told is not None:
            self._killed = [child.program.index for child in self._group.running]
        self._group.end(grace=AFTER_A_DEATH if self._told is None else 0)
        if self._lost:
            raise ClusterError(self._lost)
        return self._outcome()

    def _take(self, event: Event | None) -> None:
        match event:
            case Child() if event in self._group.children:  # and none of an earlier attempt
                self._take_end(event)
            case Told():
                self._take_signal(event.number)
            case PeerFailed() if event.attempt == self._number:
                self._end_within(0)
            case PeerLost():
                self._lost = event.text
                self._end_within(0)

    def _take_end(self, child: Child) -> None:
        if child.code == SAVED:
            self._end_within(self._grace)
        elif child.code and self._told is None:
            self._deaths.append(self._death(child, child.code))
            if len(self._deaths) == 1:
                self._on_failure()
            # Whoever ended because of another one may be seen before that one.
            self._end_within(AFTER_A_DEATH if child.code == OTHER_FAILED else 0)

    def _take_signal(self, number: int) -> None:
        if self._told is None:
            self._group.send(number)
        self._end_within(self._grace if self._told is None else 0)
        self._told = number

    def _end_within(self, seconds: float) -> None:
        self._limit = min(self._limit, time.monotonic() + seconds)

    def _death(self, child: Child, code: int) -> Death:
        program = child.program
        status = read_status(program.status)
        return Death(
            process=program.index,
            pid=child.pid,
            host=socket.gethostname(),
            code=code,
            error=status.error.partition("\n")[0] or last_words(self._words(program.index)),
            step=status.step,
            phase=status.phase,
        )

    def _outcome(self) -> Outcome:
        steps = [read_status(child.program.status).step for child in self._group.children]
        codes = [child.code for child in self._group.children]
        causes = [death for death in self._deaths if death.is_cause]
        return Outcome(
            death=next(iter(causes or self._deaths), None),
            best=max((step for step in steps if step is not None), default=None),
            all_saved=all(code == SAVED for code in codes),
            any_saved=SAVED in codes,
            told=self._told,
            killed=tuple(self._killed),
        )


TF_CONFIG = "TF_CONFIG"
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as this machine sees it."""

    processes: int
    """On all machines."""
    here: range
    """The numbers of those on this machine."""
    devices: int | None
    """How many simulated CPU devices each process has; None for those that JAX finds."""
    meeting: Path
    """The folder of the job on this machine."""
    host: str = "127.0.0.1"
    """Where process 0 listens."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def program(
        self, index: int, attempt: int, command: Sequence[str], base: Mapping[str, str]
    ) -> Program:
        """Gives one process of an attempt, whose environment is ``base`` and what the job says."""
        status = self.meeting / f"status-{attempt}-{index}"
        environment = _without_other_jobs(base)
        if self.devices:
            environment |= _simulated(self.devices, base)
            environment.pop("JAX_NUM_CPU_DEVICES", None)  # it would win over the flag
        environment |= {
            _launched.NUM_PROCESSES: str(self.processes),
            _launched.PROCESS_ID: str(index),
            _launched.LOCAL_PROCESS_ID: str(index - self.here.start),
            _launched.JOB: self.nonce,
            _launched.ATTEMPT: str(attempt),
            _launched.HOST: self.host,
            _launched.MEETING: str(self.meeting),
            _launched.STATUS: str(status),
        }
        return Program(index, command, environment, status)


def _without_other_jobs(base: Mapping[str, str]) -> dict[str, str]:
    """Takes away what describes another job, and lets Python write lines as they come."""
    removed = {TF_CONFIG, *_launched.VARIABLES}
    return {"PYTHONUNBUFFERED": "1", **{k: v for k, v in base.items() if k not in removed}}


def _simulated(devices: int, base: Mapping[str, str]) -> dict[str, str]:
    flags = _DEVICE_COUNT.sub("", base.get("XLA_FLAGS", ""))
    count = f"--xla_force_host_platform_device_count={devices}"
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags.split(), count]),
        # Fewer pool threads than devices let collectives of unread steps deadlock.
        "NPROC": str(max(2 * devices, int(base.get("NPROC") or 0))),
    }


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a folder that only this user can enter, and removes it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="distribute-jax-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


CACHE = "JAX_COMPILATION_CACHE_DIR"


def cache_folder(environment: Mapping[str, str]) -> str:
    """Gives the folder that the environment names, or makes one of this user's own.

    What lies in it is run, so that nobody else may write there.

    Args:
        environment: that of this process.

    Raises:
        ClusterError: the folder belongs to somebody else, or cannot be made.
    """
    if CACHE in environment:
        return environment[CACHE]
    above = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(above) / "distribute_jax" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        is_own = folder.stat().st_uid == os.getuid()
    except OSError as error:
        raise ClusterError(_REFUSED.format(folder=folder, why=error, name=CACHE)) from error
    if not is_own:
        raise ClusterError(_REFUSED.format(folder=folder, why="it is another user's", name=CACHE))
    return str(folder)


_REFUSED = (
    "distribute-jax launch keeps what JAX has compiled in {folder}: {why}. Set {name} to a folder that "
    "only you can write to, or to nothing to compile at every start."
)
