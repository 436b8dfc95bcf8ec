"""The job: which process this is, how the processes exchange text, cluster and timeouts."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from distribute_jax import cluster_resolver
from distribute_jax._errors import ArgumentError, DeadlineExceededError, NoClusterError
from distribute_jax.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver
from distribute_jax.processes._divergence import Course, Store
from distribute_jax.processes._status import doing

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


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """How long the processes of a job wait for each other before they say who is missing, and end.

    Args:
        start_seconds: from the making of the strategy until every process has come.
        heartbeat_seconds: after so long without a sign of life a process counts as dead; whole seconds.
        shutdown_seconds: how long a process that is done waits for the others; whole seconds.
        step_seconds: how long a step, a collective or a wait inside the library may make no progress.
            Compiling has ten times as long.

    Raises:
        ValueError: a number is not positive, or a fraction where whole seconds are wanted.

    Example:
        >>> import distribute_jax as dj
        >>> dj.ClusterOptions(step_seconds=30).heartbeat_seconds
        10
    """

    __module__ = "distribute_jax"

    start_seconds: float = 60.0
    """Until every process has come."""
    heartbeat_seconds: int = 10
    """Without a sign of life a process counts as dead after so long."""
    shutdown_seconds: int = 10
    """How long a process that is done waits for the others."""
    step_seconds: float = 300.0
    """How long nothing may move."""

    def __post_init__(self) -> None:
        """Refuses what is no time to wait."""
        for option in fields(self):
            value = getattr(self, option.name)
            whole = option.type == "int"
            kinds = int if whole else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ArgumentError(
                    f"ClusterOptions({option.name}={value!r}): {option.name} must be a positive number of "
                    f"{'whole ' if whole else ''}seconds, such as {option.default}."
                )


_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")


def xla_flags(environment: Mapping[str, str]) -> list[str]:
    """Returns the flags of XLA, but that of how many CPU devices are simulated."""
    return _DEVICE_COUNT.sub("", environment.get("XLA_FLAGS", "")).split()


_LOG = logging.getLogger("distribute_jax")


def found_resolver(given: Any, caller: str) -> ClusterResolver:
    """Gives the resolver of a strategy: the one given, the one found, or one of this process alone."""
    if given is not None:
        if not isinstance(given, ClusterResolver):
            raise ArgumentError(
                f"{caller} got {given!r:.80}, which is no ClusterResolver. Pass one of "
                'dj.cluster_resolver, such as TPUClusterResolver("local"), or leave it out.'
            )
        return given
    try:
        return cluster_resolver.detect()  # loaded here, with all it looks for
    except NoClusterError:
        _LOG.info("%s: no cluster was found around this process, so it is the only worker.", caller)
        return SimpleClusterResolver(ClusterSpec({}), task_type="worker", task_id=0)


def checked_cluster_options(given: Any, caller: str) -> ClusterOptions:
    """Gives the options of a strategy, defaults for None, or raises for another object."""
    if given is None:
        return ClusterOptions()
    if not isinstance(given, ClusterOptions):
        raise ArgumentError(
            f"{caller}(cluster_options={given!r:.80}): pass dj.ClusterOptions(start_seconds=..., "
            "step_seconds=...), or leave it out."
        )
    return given
