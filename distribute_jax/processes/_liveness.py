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

_TICK = 0.5
_MOST_A_SECOND = 100
"""Processes that write and read a second; each takes 0.4 ms of process 0."""

NEWS = "news/"
"""Where all is that each process reads at each tick: failures, processes that hang, have left or are silent,
and what process 0 has done last."""
_HEARTBEATS, _LEFT, _FAILED, _SILENT = "heartbeats/", "left/", "failed", "silent/"
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


def tick(job: Job) -> float:
    """Returns the seconds between two heartbeats of a process; its watchdog writes them."""
    return min(max(_TICK, job.count / _MOST_A_SECOND), job.options.heartbeat_seconds / 4)


def part(news: Mapping[str, str], folder: str) -> dict[str, str]:
    """Returns the news below a folder, by the rest of their keys."""
    return {key[len(folder) :]: text for key, text in news.items() if key.startswith(folder)}


def send_heartbeat(job: Job, heartbeat: Heartbeat) -> None:
    """Writes what this process is doing."""
    job.store.put(f"{_HEARTBEATS}{job.index}", json.dumps(astuple(heartbeat)))


def heartbeats(job: Job) -> dict[int, Heartbeat]:
    """Returns the last heartbeat of each process."""
    entries = job.store.under(_HEARTBEATS)
    return {int(process): Heartbeat(*json.loads(text)) for process, text in entries.items()}


def announce_left(job: Job, step: int) -> None:
    """Announces that this process is done."""
    job.store.put(f"{NEWS}{_LEFT}{job.index}", str(step))


def last_steps(job: Job) -> dict[str, str]:
    """Returns the last step of each process that is done."""
    return job.store.under(NEWS + _LEFT)


def some_left(news: Mapping[str, str]) -> bool:
    """Returns whether a process is done."""
    return any(key.startswith(_LEFT) for key in news)


def announce_failure(job: Job, text: str) -> str | None:
    """Announces the failure of this process; returns the first failure if it is that of another process.

    A process that fails takes the others with it, and they may fail in many ways: the first is the cause.
    """
    job.store.put_first(NEWS + _FAILED, json.dumps([job.index, text]))
    return failure_of_another(job, job.store.under(NEWS))


def failure_of_another(job: Job, news: Mapping[str, str]) -> str | None:
    """Returns which other process has failed, and how; None where none has."""
    process, text = json.loads(news.get(_FAILED, f"[{job.index}, null]"))
    return None if process == job.index else f"{job.name_of(process)} failed: {text}"


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
        time.sleep(_TICK + 2 * tick(job))
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
    """Looks, on process 0, for processes whose heartbeats stopped, and reports them on all.

    A report is withdrawn when the heartbeats go on.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: dict[int, tuple[int, float]] = {}
        self._reported: set[int] = set()
        self._shown: set[str] = set()

    def look(self) -> None:
        """Notes which processes have written nothing since the last time."""
        now = time.monotonic()
        limit = self._job.options.heartbeat_seconds
        for process, heartbeat in heartbeats(self._job).items():
            number, since = self._last.get(process, (None, now))
            key = f"{NEWS}{_SILENT}{process}"
            if number != heartbeat.number:
                self._last[process] = heartbeat.number, now
                if process in self._reported:
                    self._reported.remove(process)
                    self._job.store.remove(key)
            elif now - since > max(limit - _BEFORE, limit / 2) and process not in self._reported:
                self._reported.add(process)
                self._job.store.put(
                    key,
                    f"{self._job.name_of(process)} has sent no heartbeat for {now - since:.0f} s; last seen "
                    f"{heartbeat}. If it is stopped or gone, JAX ends this process with SIGABRT after "
                    f"{limit} s (ClusterOptions.heartbeat_seconds).",
                )

    def show(self, news: Mapping[str, str]) -> None:
        """Writes each report once, and removes it from the status when none is left."""
        silent = part(news, _SILENT)
        for process in silent.keys() - self._shown - {f"{self._job.index}"}:
            status_writer().error(silent[process])
            sys.stderr.write(f"distribute_jax: {silent[process]}\n")
            sys.stderr.flush()
        if self._shown and not silent:
            status_writer().error("")
        self._shown = {*silent}
