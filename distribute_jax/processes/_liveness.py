"""Heartbeats: what each process writes about itself into the store, and which ones stopped.

JAX misses the heartbeats of a process that is stopped, or whose machine is gone, and then ends every other
process from C++ with SIGABRT, which no Python can stop. So the reason is reported shortly before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import jax

from distribute_jax._supervision import AWAITED
from distribute_jax.processes._job import Job, current_job
from distribute_jax.processes._status import status_writer

TICK = 0.5
"""Seconds between two heartbeats of a process; its watchdog writes them."""

_HEARTBEATS, _LEFT, _FAILED = "heartbeats/", "left/", "failed/"
_MOST_LINES = 64
_BEFORE = 2.5
"""Seconds before JAX, whose clock is another one, ends the process."""


@dataclass(frozen=True)
class Heartbeat:
    """What a process writes about itself."""

    number: int
    """Counts the heartbeats of a process, so that one sees whether it still writes them."""
    step: int
    """How many steps it has dispatched."""
    phase: str | None
    """What it waits for; None where it waits for nothing."""
    seconds: float
    """How long it has waited."""

    def __str__(self) -> str:
        if self.phase is None:
            return f"at step {self.step}, in your code"
        return f"at step {self.step}, {self.phase} for {self.seconds:.0f} s"


def send_heartbeat(job: Job, heartbeat: Heartbeat) -> None:
    """Writes what this process is doing."""
    job.store.put(f"{_HEARTBEATS}{job.index}", json.dumps(astuple(heartbeat)))


def heartbeats(job: Job) -> dict[int, Heartbeat]:
    """Returns the last heartbeat of each process."""
    entries = job.store.under(_HEARTBEATS)
    return {int(process): Heartbeat(*json.loads(text)) for process, text in entries.items()}


def announce_left(job: Job, step: int) -> None:
    """Announces that this process is done."""
    job.store.put(f"{_LEFT}{job.index}", str(step))


def last_steps(job: Job) -> dict[str, str]:
    """Returns the last step of each process that is done."""
    return job.store.under(_LEFT)


def announce_failure(job: Job, text: str) -> str | None:
    """Announces the failure of this process; returns the first failure if it is that of another process.

    A process that fails takes the others with it, and they may fail in many ways: the first is the cause.
    """
    job.store.put_first(f"{_FAILED}first", json.dumps([job.index, text]))
    return failure_of_another(job)


def failure_of_another(job: Job) -> str | None:
    """Returns which other process has failed, and how; None where none has."""
    for entry in job.store.under(_FAILED).values():
        process, text = json.loads(entry)
        if process != job.index:
            return f"{job.name_of(process)} failed: {text}"
    return None


def last_seen(job: Job, process: int) -> str:
    """Returns what a process was last seen doing."""
    if step := last_steps(job).get(str(process)):
        return f": left at step {step}, while the others go on"
    heartbeat = heartbeats(job).get(process)
    return f": {heartbeat}" if heartbeat else ": has not been seen since the start"


def describe_processes() -> str:
    """Returns what every process is doing, as the end of a message; empty in a process that is alone.

    It takes a moment, to see which processes still write heartbeats.
    """
    job = current_job()
    if job.is_alone:
        return ""
    try:
        before = heartbeats(job)
        time.sleep(3 * TICK)
        lines = _lines(job, before, heartbeats(job), last_steps(job))
    except jax.errors.JaxRuntimeError:
        return ""  # process 0 is gone
    return "\nAll processes of a job compute a step together. Where each is:\n" + "\n".join(lines)


def _lines(
    job: Job,
    before: Mapping[int, Heartbeat],
    after: Mapping[int, Heartbeat],
    left: Mapping[str, str],
) -> list[str]:
    steps = [heartbeat.step for heartbeat in before.values()] or [0]
    somebody_waits = min(steps) < max(steps) or any(beat.phase for beat in before.values())
    lines = []
    for i in range(job.count):
        is_awaited = True
        if str(i) in left:
            text = f"left at step {left[str(i)]}, while the others go on"
        elif i not in before:
            text = "no heartbeat since the start"
        elif before[i].number == after[i].number and i != job.index:  # this thread may write them
            text = f"no heartbeat; last seen {before[i]}"
        else:
            text = str(before[i])
            is_awaited = before[i].phase is None and before[i].step == min(steps)
        mark = f"   {AWAITED}" if is_awaited and somebody_waits else ""
        lines.append(f"  {job.name_of(i)}: {text}{mark}")
    return lines[:_MOST_LINES]


class HeartbeatMonitor:
    """Reports once a process whose heartbeats stopped, and withdraws the report when they go on."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: dict[int, tuple[int, float]] = {}
        self._reported: set[int] = set()

    def check(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Looks for processes that have written nothing since the last time."""
        now = time.monotonic()
        limit = self._job.options.heartbeat_seconds
        for process, heartbeat in heartbeats.items():
            number, since = self._last.get(process, (None, now))
            if number != heartbeat.number:
                self._last[process] = heartbeat.number, now
                if process in self._reported:
                    self._reported.remove(process)
                    status_writer().error("")
            elif now - since > max(limit - _BEFORE, limit / 2) and process not in self._reported:
                self._reported.add(process)
                if process != self._job.index:
                    self._report(process, now - since, heartbeat)

    def _report(self, process: int, seconds: float, heartbeat: Heartbeat) -> None:
        limit = self._job.options.heartbeat_seconds
        message = (
            f"{self._job.name_of(process)} has sent no heartbeat for {seconds:.0f} s; last seen {heartbeat}. "
            f"If it is stopped or gone, JAX ends this process with SIGABRT after {limit} s "
            "(ClusterOptions.heartbeat_seconds)."
        )
        status_writer().error(message)
        sys.stderr.write(f"distribute_jax: {message}\n")
        sys.stderr.flush()
