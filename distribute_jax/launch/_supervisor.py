"""Starts a job's processes, watches them, and starts all again while that brings it further."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from distribute_jax.cluster._launched import coordinator_file
from distribute_jax.launch._attempt import Attempt
from distribute_jax.launch._child import Program, Sink
from distribute_jax.launch._events import Inbox, signals_into
from distribute_jax.launch._group import Group
from distribute_jax.launch._job import Job, private_folder
from distribute_jax.launch._machines import Machines
from distribute_jax.launch._outcome import Outcome
from distribute_jax.launch._output import Printer
from distribute_jax.launch._verdict import Progress, decide


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
