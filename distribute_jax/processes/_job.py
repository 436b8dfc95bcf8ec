"""The job: which process this is, its timeouts, and the exchange of texts between the processes."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from jax.sharding import Mesh

from distribute_jax._checks import check_number, check_optional, refuse
from distribute_jax._errors import DeadlineExceededError
from distribute_jax._mesh import is_local
from distribute_jax.processes._divergence import ActionLog, KeyValueStore
from distribute_jax.processes._status import doing

_SLACK = 1.0
"""How much longer the others wait than process 0, which tells them who is missing."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The timeouts of a job, after which the processes name the one that they wait for, and exit.

    Args:
        start_seconds: the time from the construction of the strategy until all processes are connected.
        heartbeat_seconds: the time without heartbeats after which a process counts as dead; an int.
        shutdown_seconds: the time that a finished process waits for the others; an int.
        step_seconds: the time without progress of a step, a collective or a wait inside the library;
            compiling may take ten times as long.

    Raises:
        ValueError: a number is not positive, above 1e9, or not an int where one is required.

    Example:
        >>> import distribute_jax as dj
        >>> dj.ClusterOptions(step_seconds=30).heartbeat_seconds
        10
    """

    start_seconds: float = 60.0
    heartbeat_seconds: int = 10
    shutdown_seconds: int = 10
    step_seconds: float = 300.0

    def __post_init__(self) -> None:
        for option in fields(self):
            check_number(f"ClusterOptions: {option.name}", getattr(self, option.name), most=1e9)


@dataclass(frozen=True)
class ProcessInfo:
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


@dataclass
class Job:
    """A job, as one of its processes sees it."""

    index: int
    """The index of this process."""
    count: int
    options: ClusterOptions
    store: KeyValueStore
    processes: Sequence[ProcessInfo] = ()
    """Where they run; empty if that is unknown."""
    last_seen: Callable[[int], str] = lambda process: ""
    actions: ActionLog = field(init=False)
    _rounds: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.actions = ActionLog(self.index, self.count, self.store)

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def exchange(
        self, topic: str, text: str, seconds: float | None = None, place: str = ""
    ) -> list[str]:
        """Sends a text to every process, and returns the texts of all, in order; a collective call.

        If a process does not call it in time, it raises on all that do. ``place`` describes the call for the
        user.
        """
        if self.is_alone:
            return [text]
        if threading.current_thread() is threading.main_thread():
            # So the watchdogs notice processes that wait in different places, long before the timeout.
            self.actions.record(f"waiting for all processes at {topic!r}")
        with self._lock:
            number = self._rounds[topic]
            self._rounds[topic] += 1
        limit = self.options.step_seconds if seconds is None else seconds
        folder = f"round/{topic}/{number}/"
        with doing(f"waiting for all processes at {place or repr(topic)}"):
            if self.index == 0:
                answer = self._collect(folder, text, limit)
            else:
                self.store.put(f"{folder}{self.index}", text)
                answer = self.store.get(f"{folder}all", limit + _SLACK) or self._give_up(folder)
        result = json.loads(answer)
        if "missing" in result:
            raise self._late(result["missing"], place or repr(topic), limit)
        if self.index == 0 and number:
            # All have reached this round, so nobody reads the previous one any more.
            self.store.remove(f"round/{topic}/{number - 1}/")
        return result["texts"]

    def barrier(self, name: str, seconds: float | None = None) -> None:
        """Waits for all processes; its arguments are the user's."""
        if not name:
            refuse("strategy.barrier: name", "a non-empty str", name)
        check_optional(check_number, "strategy.barrier: timeout", seconds)
        self.exchange(f"barrier {name}", "", seconds)

    def _collect(self, folder: str, local: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        texts = {"0": local}
        while missing := [i for i in range(self.count) if str(i) not in texts]:
            # Waits for one of them; by then most others have written too, and are read together.
            left = deadline - time.monotonic()
            text = self.store.get(f"{folder}{missing[0]}", max(left, 0.001))
            if text is not None and self.count == 2:
                texts[str(missing[0])] = text
            else:
                texts |= self.store.under(folder)
            if text is None and left <= 0:
                break
        in_order = [texts.get(str(i), "") for i in range(self.count)]
        answer = json.dumps({"missing": missing} if missing else {"texts": in_order})
        return self.store.put_if_absent(f"{folder}all", answer)

    def _give_up(self, folder: str) -> str:
        """Ends a round for all processes, also late ones; returns its result."""
        texts = self.store.under(folder)
        missing = [i for i in range(self.count) if str(i) not in texts]
        return self.store.put_if_absent(f"{folder}all", json.dumps({"missing": missing or [0]}))

    def _late(self, missing: Sequence[int], place: str, seconds: float) -> DeadlineExceededError:
        if self.index in missing:
            return DeadlineExceededError(
                f"Process {self.index} of {self.count} reached {place} too late: the others waited for it "
                "and gave up. Every process has to reach it, in the same order. If one only "
                "needs longer, give it more time: dj.ClusterOptions(step_seconds=...)."
            )
        lines = "\n".join(f"  {self.name_of(i)}{self.last_seen(i)}" for i in missing)
        return DeadlineExceededError(
            f"Process {self.index} of {self.count} has waited {seconds:g} s for {place}, which not every "
            f"process has reached. Missing:\n{lines}\nEvery process has to reach it, in the same order. Look "
            "at the output of those that are missing; if they only need longer, give them more time: "
            "dj.ClusterOptions(step_seconds=...)."
        )

    def name_of(self, process: int) -> str:
        """Returns the index of a process and, if known, its host and pid."""
        known = f" ({self.processes[process]})" if process < len(self.processes) else ""
        return f"process {process}{known}"


_ALONE = Job(0, 1, ClusterOptions(), KeyValueStore(None))
_current: Job = _ALONE


def current_job() -> Job:
    return _current


def job_of(mesh: Mesh) -> Job:
    """Returns the job of the processes that share a mesh; a job of one process if the mesh is local."""
    return _ALONE if _current is _ALONE or is_local(mesh) else _current


def set_job(new: Job) -> None:
    global _current
    _current = new


def is_chief() -> bool:
    """Returns True on process 0, which writes what a job writes once, such as logs and progress bars.

    The only process of a job is its chief.

    Example:
        >>> import distribute_jax as dj
        >>> dj.is_chief()
        True
    """
    return _current.index == 0
