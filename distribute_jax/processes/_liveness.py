"""Heartbeats: what each process writes about itself into the store, and which ones stopped.

JAX misses the heartbeats of a process that is stopped, or whose machine is gone, and then ends every other
process from C++ with SIGABRT, which no Python can stop. So the reason is reported shortly before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from distribute_jax.processes._job import Job, job
from distribute_jax.processes._status import own_status

TICK = 0.5
"""Seconds between two notes of a process about where it is; its watchdog writes them."""

_PULSE, _LEFT, _FAILED, _STUCK = "pulse/", "left/", "failed/", "stuck/"
_AWAITED = "   <- the others wait for it"
_MOST_LINES = 64


@dataclass(frozen=True)
class Place:
    """Where a process says it is."""

    turn: int
    """Counts its notes, so that one sees whether it still writes them."""
    step: int
    """Steps that it has dispatched."""
    phase: str | None
    """What it waits for; None while it waits for nothing."""
    seconds: float
    """How long it has waited."""

    def __str__(self) -> str:
        """Says it in words."""
        if self.phase is None:
            return f"at step {self.step}, in your code"
        return f"at step {self.step}, {self.phase} for {self.seconds:.0f} s"


def note_place(found: Job, place: Place) -> None:
    """Tells the others where this process is."""
    said = [place.turn, place.step, place.phase, place.seconds]
    found.store.put(f"{_PULSE}{found.index}", json.dumps(said))


def note_left(found: Job, step: int) -> None:
    """Tells the others that this process is done."""
    found.store.put(f"{_LEFT}{found.index}", str(step))


def note_failed(found: Job, text: str) -> str | None:
    """Tells the others that this process has failed, and how; gives the failure that was first, if another's.

    A process that fails takes the others with it, and they may fail in many ways: the first is the cause.
    """
    found.store.put_first(f"{_FAILED}first", json.dumps([found.index, text]))
    return failure_of_another(found)


def note_stuck(found: Job, verdict: str) -> None:
    """Tells the others that nothing moves any more."""
    found.store.put(f"{_STUCK}{found.index}", verdict)


def some_left(found: Job) -> bool:
    """Tells whether a process is done."""
    return bool(found.store.under(_LEFT))


def all_left(found: Job) -> bool:
    """Tells whether every process is done."""
    return len(found.store.under(_LEFT)) == found.count


def failure_of_another(found: Job) -> str | None:
    """Says which other process has failed, and how; None where none has."""
    for told in found.store.under(_FAILED).values():
        process, text = json.loads(told)
        if process != found.index:
            return f"{found.name_of(process)} failed: {text}"
    return None


def verdict(found: Job) -> str | None:
    """Gives what the first process said that found nothing moving; None where none has."""
    return next(iter(found.store.under(_STUCK).values()), None)


def whereabouts(found: Job, process: int) -> str:
    """Says what a process was last seen doing."""
    if left := found.store.under(_LEFT).get(str(process)):
        return f": left at step {left}, while the others go on"
    place = places(found).get(process)
    return f": {place}" if place else ": has not been seen since the start"


def roll_call() -> str:
    """Gives where every process of this job is, as the end of a message; nothing for one that is alone.

    It takes a moment, to see which processes still write.
    """
    found = job()
    if found is None:
        return ""
    try:
        before = places(found)
        time.sleep(3 * TICK)
        lines = _lines(found, before, places(found), found.store.under(_LEFT))
    except jax.errors.JaxRuntimeError:
        return ""  # process 0 is gone
    return "\nAll processes of a job compute a step together. Where each is:\n" + "\n".join(lines)


def places(found: Job) -> dict[int, Place]:
    """Gives where each process was last seen."""
    told = found.store.under(_PULSE)
    return {int(process): Place(*json.loads(text)) for process, text in told.items()}


def _lines(
    found: Job, before: Mapping[int, Place], after: Mapping[int, Place], left: Mapping[str, str]
) -> list[str]:
    steps = [place.step for place in before.values()] or [0]
    somebody_waits = min(steps) < max(steps) or any(place.phase for place in before.values())
    lines = []
    for i in range(found.count):
        is_awaited = True
        if str(i) in left:
            text = f"left at step {left[str(i)]}, while the others go on"
        elif i not in before:
            text = "silent since the start"
        elif before[i].turn == after[i].turn and i != found.index:  # who asks may be who writes
            text = f"silent; last seen {before[i]}"
        else:
            text = str(before[i])
            is_awaited = before[i].phase is None and before[i].step == min(steps)
        mark = _AWAITED if is_awaited and somebody_waits else ""
        lines.append(f"  {found.name_of(i)}: {text}{mark}")
    return lines[:_MOST_LINES]


_BEFORE = 2.5
"""Seconds before JAX, which has no clock in common with this, ends the process."""


class Silence:
    """Says once which process gives no sign of life, and takes it back where it does again."""

    def __init__(self, job: Job) -> None:
        """Begins to listen to the other processes."""
        self._job = job
        self._heard: dict[int, tuple[int, float]] = {}
        self._told: set[int] = set()

    def look(self, places: Mapping[int, Place]) -> None:
        """Looks at who has written since the last time."""
        now = time.monotonic()
        limit = self._job.options.heartbeat_seconds
        for process, place in places.items():
            turn, since = self._heard.get(process, (None, now))
            if turn != place.turn:
                self._heard[process] = place.turn, now
                if process in self._told:
                    self._told.remove(process)
                    own_status().error("")
            elif now - since > max(limit - _BEFORE, limit / 2) and process not in self._told:
                self._told.add(process)
                self._say(process, now - since, place)

    def _say(self, process: int, seconds: float, place: Place) -> None:
        if process == self._job.index:
            return
        limit = self._job.options.heartbeat_seconds
        words = (
            f"{self._job.name_of(process)} gives no sign of life for {seconds:.0f} s; last seen {place}. "
            f"Where it is stopped or gone, JAX ends this process with SIGABRT after {limit} s "
            "(ClusterOptions.heartbeat_seconds)."
        )
        own_status().error(words)
        sys.stderr.write(f"distribute_jax: {words}\n")
        sys.stderr.flush()
