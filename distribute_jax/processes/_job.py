"""The processes that compute together: which one this is, and how they talk."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distribute_jax._errors import ArgumentError, DeadlineExceededError
from distribute_jax.processes._course import Course
from distribute_jax.processes._options import ClusterOptions
from distribute_jax.processes._pulse import doing
from distribute_jax.processes._store import Store

_SLACK = 1.0
"""Seconds that the others wait longer than process 0, so that they hear from it who is missing."""


@dataclass(frozen=True)
class Member:
    """One process as the others know it."""

    host: str
    pid: int

    def __str__(self) -> str:
        """Names where it runs."""
        return f"{self.host}, pid {self.pid}"


@dataclass
class Job:
    """All processes of a job, seen by one of them."""

    index: int
    """Which process this is."""
    count: int
    """How many there are."""
    options: ClusterOptions
    store: Store
    members: Sequence[Member] = ()
    """Who they are, where that is known."""
    whereabouts: Callable[[int], str] = lambda process: ""
    """What a process was last seen doing."""
    course: Course = field(init=False)
    """What this process has done so far, for the others to compare."""
    _rounds: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Starts where every process starts."""
        self.course = Course(self.index, self.count, self.store)

    def exchange(
        self, topic: str, text: str, seconds: float | None = None, place: str = ""
    ) -> list[str]:
        """Tells every process a text and gives what each has told, in the order of the processes.

        All processes call it equally often for each topic.

        Args:
            topic: what it is about; each topic counts its own rounds.
            text: what this process says.
            seconds: how long to wait for the others; ``step_seconds`` if None.
            place: where that is in the user's program, for messages; the topic if empty.

        Raises:
            DeadlineExceededError: a process has not come in time; on all that have.
        """
        with self._lock:
            number = self._rounds[topic]
            self._rounds[topic] += 1
        limit = self.options.step_seconds if seconds is None else seconds
        folder = f"round/{topic}/{number}/"
        with doing(f"waiting for all processes at {place or repr(topic)}"):
            self.store.put(f"{folder}{self.index}", text)
            if self.index == 0:
                told = self._collect(folder, limit)
            else:
                told = self.store.get(f"{folder}all", limit + _SLACK) or self._give_up(folder)
        answer = json.loads(told)
        if "missing" in answer:
            raise self._late(answer["missing"], place or repr(topic), limit)
        if self.index == 0 and number:
            # All have come to this round, so nobody reads the one before any more.
            self.store.remove(f"round/{topic}/{number - 1}/")
        said: list[str] = answer["said"]
        return said

    def barrier(self, name: str, seconds: float | None = None) -> None:
        """Waits until every process has come here.

        Args:
            name: what the processes wait for.
            seconds: how long; ``step_seconds`` if None.

        Raises:
            DeadlineExceededError: a process has not come in time.
        """
        self.exchange(f"barrier {name}", "", seconds)

    def _collect(self, folder: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        said = [
            self.store.get(f"{folder}{i}", max(deadline - time.monotonic(), 0.001))
            for i in range(self.count)
        ]
        missing = [i for i, text in enumerate(said) if text is None]
        told = json.dumps({"missing": missing} if missing else {"said": said})
        return self.store.put_first(f"{folder}all", told)

    def _give_up(self, folder: str) -> str:
        """Ends a round for all, those included that come to it later; gives what is known of it."""
        came = self.store.under(folder)
        missing = [i for i in range(self.count) if str(i) not in came]
        return self.store.put_first(f"{folder}all", json.dumps({"missing": missing or [0]}))

    def _late(self, missing: Sequence[int], place: str, seconds: float) -> DeadlineExceededError:
        if self.index in missing:
            return DeadlineExceededError(
                f"Process {self.index} of {self.count} came too late to {place}: the others had waited for "
                "it, and have given up. Every process has to come here, in the same order. Where one only "
                "needs longer, give it more time: dj.ClusterOptions(step_seconds=...)."
            )
        lines = "\n".join(f"  {self.name_of(i)}{self.whereabouts(i)}" for i in missing)
        return DeadlineExceededError(
            f"Process {self.index} of {self.count} has waited {seconds:g} s for {place}, and not every "
            f"process has come. Missing:\n{lines}\nEvery process has to come here, in the same order. Look "
            "at the output of those that are missing; where they only need longer, give them more time: "
            "dj.ClusterOptions(step_seconds=...)."
        )

    def name_of(self, process: int) -> str:
        """Names a process and, where that is known, its host and pid."""
        known = f" ({self.members[process]})" if process < len(self.members) else ""
        return f"process {process}{known}"


_current: Job | None = None


def job() -> Job | None:
    """Gives the job of this process; None where it is alone."""
    return _current


def set_job(new: Job | None) -> None:
    """Remembers the job of this process."""
    global _current
    _current = new


def is_chief() -> bool:
    """Tells whether this process writes what is written once for a job: logs, bars, checkpoints' manifests.

    Process 0 does; a process that is alone is its own chief.

    Example:
        >>> import distribute_jax as dj
        >>> dj.is_chief()
        True
    """
    return _current is None or _current.index == 0


def checked_barrier(name: object, timeout: object) -> None:
    """Raises for what is no name of a barrier, or no time to wait."""
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            f"strategy.barrier(name={name!r:.80}): the name is a text that is not empty, the same on all "
            "processes, such as 'data is ready'."
        )
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):  # type: ignore[operator]
        raise ArgumentError(
            f"strategy.barrier(timeout={timeout!r:.80}): a positive number of seconds, or None for "
            "ClusterOptions.step_seconds."
        )
