"""The updates of the state: the log that orders them, and the servers that apply them in that order.

The log admits only runs whose update will not be too stale. A worker may be lost, and a run may be repeated
or reported twice: the log accepts one update for each closure and gives it the next number. All servers apply
updates in this order, so that "after n updates" is the same state on all of them: for reads, checkpoints and
replays. The log knows closures only as keys.

A server stores a part of the state. What a run computed is staged before its update has a number, and a
number may arrive before those of earlier updates: an update is applied once all earlier ones are. A request
that arrives twice changes nothing the second time. What a worker reads is set aside between two updates, so
that all servers return one version.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from distribute_jax.servers._wire import Message


class Attempt(NamedTuple):
    """One worker's run of a closure, or of its share of one."""

    closure: Any
    number: int
    """Unique to this run."""
    worker: int
    share: int
    pulled: int
    """The version of the state that it reads: the number of updates before."""
    epoch: int
    """How many times the servers had returned to a snapshot."""


class Update(NamedTuple):
    """A finished closure: what all servers apply next."""

    number: int | None
    """The version of the state before it; None if the closure writes no state."""
    closure: Any
    attempts: tuple[Attempt, ...]
    """The run of each share."""
    oldest_run: int
    """The first run that was still under way; earlier ones were applied or given up."""

    @property
    def staleness(self) -> int:
        """How many updates were applied between the state that it read and itself."""
        return 0 if self.number is None else self.number - self.attempts[0].pulled


@dataclass(eq=False)
class _Shares:
    count: int
    writes: bool
    done: dict[int, Attempt] = field(default_factory=dict)
    was_applied: bool = False
    """True once it is an update, also if the servers return to a snapshot from before."""


class Log:
    """Closures that wait or run, and the updates of those that have finished.

    At most ``max_staleness`` updates come between the state that an update was computed from and itself. The
    shares of a closure are computed from one version, and are one update.
    """

    def __init__(self, max_staleness: float) -> None:
        self.max_staleness = max_staleness
        self.version = self.epoch = self.attempts = 0
        """How many updates the state has had, how often servers lost some, how many runs have begun."""
        self.open: dict[Any, _Shares] = {}
        """The closures that have not finished."""
        self._waiting: deque[tuple[Any, int]] = deque()
        self._runs: dict[int, Attempt] = {}
        """The runs that are under way, in order; those that are done if their closure has not finished."""
        self._updates: list[tuple[Update, _Shares]] = []
        """The latest updates, whose closures run again if the servers return to a snapshot."""

    def add(self, closure: Any, *, shares: int = 1, writes: bool = True) -> None:
        self.open[closure] = _Shares(shares, writes)
        self._waiting.extend((closure, share) for share in range(shares))

    def admit(self, worker: int) -> Attempt | None:
        """Returns what a worker runs next; None if nothing waits, or its update might be too stale."""
        if not self._waiting:
            return None
        closure, share = self._waiting[0]
        writes, is_ordered = self.open[closure].writes, self._is_ordered(closure)
        pulled = {r.closure: r.pulled for r in self._runs.values() if self._is_ordered(r.closure)}
        if not writes and len(pulled.keys() - {closure}) > self.max_staleness:
            return None  # it would miss more of the updates that were added before
        if is_ordered and closure not in pulled:
            # The bound holds for all updates under way and this one, in whichever order they finish.
            oldest = min(pulled.values(), default=self.version)
            if self.version - oldest + len(pulled) > self.max_staleness:
                return None
        self._waiting.popleft()
        self.attempts += 1
        version = pulled.get(closure, self.version)
        attempt = Attempt(closure, self.attempts, worker, share, version, self.epoch)
        self._runs[attempt.number] = attempt
        return attempt

    def _is_ordered(self, closure: Any) -> bool:
        """Returns True if no update may come between the runs of a closure, or too many before its own."""
        return self.open[closure].writes or self.open[closure].count > 1

    def finish(self, attempt: Attempt) -> Update | None:
        """Notes that a run is staged on all servers; returns the update if its closure is complete."""
        if attempt.number not in self._runs:
            return None  # it was given up, or belongs to an earlier epoch
        closure, shares = attempt.closure, self.open[attempt.closure]
        shares.done[attempt.share] = attempt
        if len(shares.done) < shares.count:
            return None
        del self.open[closure]
        runs = tuple(shares.done[share] for share in range(shares.count))
        for run in runs:
            del self._runs[run.number]
        oldest = next(iter(self._runs), self.attempts + 1)
        update = Update(self.version if shares.writes else None, closure, runs, oldest)
        if shares.writes:
            shares.was_applied = True
            self._updates.append((update, shares))
            self.version += 1
        return update

    def give_up(self, worker: int) -> None:
        """Lets other workers run what a lost one was running."""
        for run in reversed([run for run in self._runs.values() if run.worker == worker]):
            if run.share not in self.open[run.closure].done:
                del self._runs[run.number]
                self._waiting.appendleft((run.closure, run.share))

    def cancel(self, closure: Any = None) -> list[Any]:
        """Removes a closure, or all that have never begun; returns those that were removed."""
        begun = {run.closure for run in self._runs.values()}
        begun.update(c for c, shares in self.open.items() if shares.was_applied)
        cancelled = [c for c in self.open if c not in begun] if closure is None else [closure]
        for one in cancelled:
            del self.open[one]
        self._runs = {n: run for n, run in self._runs.items() if run.closure in self.open}
        self._waiting = deque((c, share) for c, share in self._waiting if c in self.open)
        return cancelled

    def go_back(self, version: int) -> list[Update]:
        """Takes back the updates since a version; their closures run again before those that wait."""
        again = self._updates[version - self._first :]
        del self._updates[version - self._first :]
        self.open = {update.closure: shares for update, shares in again} | self.open
        for shares in self.open.values():
            shares.done.clear()
        self._waiting = deque(
            (c, i) for c, shares in self.open.items() for i in range(shares.count)
        )
        self._runs.clear()
        self.version = version
        self.epoch += 1
        return [update for update, _ in again]

    def forget(self, version: int) -> None:
        """Drops what is needed only to go back to before a version."""
        del self._updates[: version - self._first]

    @property
    def _first(self) -> int:
        # The earliest version that the log can go back to.
        return self.version - len(self._updates)


Key = int
"""The number of one array of state."""


class _Program(NamedTuple):
    reads: Sequence[Key]
    writes: Sequence[Key]
    apply: Any
    """Returns the values to write, from those that it reads and the sums of what the workers sent."""


class Store:
    """The arrays of one server, and the updates that wait for their turn."""

    def __init__(self) -> None:
        self.version = self.epoch = 0
        self.state: dict[Key, Any] = {}
        self._programs: dict[str, _Program] = {}
        self._staged: dict[int, tuple[str, Sequence[Any]]] = {}
        """By run, its program and what the worker sent."""
        self._waiting: dict[int, tuple[Sequence[int], int]] = {}
        """By the number of an update, its runs, and the oldest run that was under way then."""
        self._oldest = 0
        self._prepared: dict[int, tuple[list[Key], list[Any]]] = {}
        self._unshared: set[Key] = set()
        """The arrays that nobody else refers to, whose rows can be updated in place."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def request(self, message: Message) -> Callable[[], Message]:
        """Answers a worker of this process, like ``Connection.request``."""
        return partial(self.answer, message)

    def answer(self, message: Message) -> Message:
        epoch, run, argument = message.plain
        if message.name == "stage":
            self.stage(epoch, run, argument, message.arrays)
            return Message("staged")
        values = self.fetch(epoch, run, argument, message.arrays)
        return Message("void") if values is None else Message("values", arrays=values)

    def load(self, name: str, reads: Sequence[Key], writes: Sequence[Key], apply: Any) -> None:
        self._programs[name] = _Program(reads, writes, apply)

    def stage(self, epoch: int, run: int, program: str, sent: Sequence[Any]) -> None:
        """Keeps what a worker computed until its update has a number."""
        with self._lock:
            while epoch > self.epoch:  # the coordinator's request to go back is still on its way
                self._changed.wait()
            if epoch == self.epoch and run >= self._oldest:
                self._staged[run] = program, sent

    def prepare(self, run: int, keys: Sequence[Key]) -> None:
        """Sets aside the arrays that a run reads, as they are between two updates."""
        with self._lock:
            self._prepared[run] = [*keys], [self.state[key] for key in keys]
            self._changed.notify_all()

    def fetch(
        self, epoch: int, run: int, at: Sequence[int] = (), rows: Sequence[Any] = ()
    ) -> list[Any] | None:
        """Waits for what a run reads, of the arrays ``at`` positions only ``rows``; None if it is void."""
        with self._lock:
            while epoch > self.epoch or (epoch == self.epoch and run not in self._prepared):
                if epoch == self.epoch and run < self._oldest:
                    return None  # another share of its closure has failed
                self._changed.wait()
            if epoch != self.epoch:
                return None
            keys, values = self._prepared.pop(run)
            for i, ids in zip(at, rows, strict=True):
                values[i] = _rows_of(values[i], ids)
            self._unshared -= {key for i, key in enumerate(keys) if i not in at}
            return values

    def commit(self, epoch: int, number: int, runs: Sequence[int], oldest: int) -> None:
        """Applies the sum of some runs after all earlier updates; drops other runs before ``oldest``."""
        with self._lock:
            if epoch == self.epoch and number >= self.version:
                self._waiting[number] = runs, oldest
            while self.version in self._waiting:
                # Not when a commit arrives: those of earlier updates may come after it.
                self._apply(*self._waiting.pop(self.version))
                self.version += 1

    def _apply(self, runs: Sequence[int], oldest: int) -> None:
        (name, sent), *others = [self._staged.pop(run) for run in runs]
        program = self._programs[name]
        for _, other in others:
            sent = list(map(operator.add, sent, other))
        apply: Any = program.apply
        touched = {program.reads[i] for i in getattr(apply, "touched", ())}
        if touched and touched <= self._unshared:
            prepared = {id(x) for _, values in self._prepared.values() for x in values}
            if prepared.isdisjoint(id(self.state[k]) for k in touched):
                apply = apply.in_place
        new = apply([self.state[key] for key in program.reads], sent)
        self._unshared = self._unshared.difference(program.writes) | touched
        self.state.update(zip(program.writes, new, strict=True))
        self._oldest = max(self._oldest, oldest)
        self._staged = {run: x for run, x in self._staged.items() if run >= self._oldest}
        self._prepared = {run: x for run, x in self._prepared.items() if run >= self._oldest}
        self._changed.notify_all()

    def assign(self, keys: Sequence[Key], arrays: Sequence[Any]) -> None:
        """Sets arrays; existing ones only while no update is under way."""
        self.state.update(zip(keys, arrays, strict=True))
        self._unshared.difference_update(keys)

    def pull(self, keys: Collection[Key]) -> list[Any]:
        self._unshared.difference_update(keys)
        return [self.state[key] for key in keys]

    def restore(
        self, epoch: int, version: int, keys: Sequence[Key] = (), arrays: Sequence[Any] = ()
    ) -> None:
        """Goes back to the state of a version; what was staged since is void."""
        with self._lock:
            self.epoch, self.version, self._oldest = epoch, version, 0
            self.state = dict(zip(keys, arrays, strict=True))
            self._staged, self._waiting, self._prepared, self._unshared = {}, {}, {}, set()
            self._changed.notify_all()

    def forget(self, keys: Iterable[Key], programs: Iterable[str] = ()) -> None:
        for key in keys:
            self.state.pop(key, None)
        for name in programs:
            self._programs.pop(name, None)


def _rows_of(array: Any, ids: Any) -> Any:
    # Padded to a power of two, so that few programs are compiled.
    padded = np.zeros(1 << max(6, (len(ids) - 1).bit_length()), np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_take(array, padded))[: len(ids)]


_take = jax.jit(lambda array, ids: array[ids])
