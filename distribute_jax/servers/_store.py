"""One server: it has a part of the state, and applies updates in the order of the log.

A run is staged before it gets its number, and its number may arrive before those of earlier updates: it is
applied when all earlier ones are. Requests may be sent twice: the second changes nothing. What a worker reads
is set aside between two updates, so that it has the values of one version on all servers.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from distribute_jax.servers._wire import Message

Key = int
"""The number of one array of state."""


@dataclass(frozen=True)
class ServerProgram:
    """What a server does with what workers computed."""

    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    apply: Any
    """Returns the new values, from the values that it reads and the sums of what the workers sent."""


class Snapshot(NamedTuple):
    """The state after so many updates."""

    version: int
    state: Mapping[Key, Any]


class _Run(NamedTuple):
    program: str
    sent: Sequence[Any]


class Store:
    """The arrays of one server, and the updates that wait for their turn."""

    def __init__(self) -> None:
        """Starts with no state."""
        self.version = self.epoch = 0
        self.state: dict[Key, Any] = {}
        self._programs: dict[str, ServerProgram] = {}
        self._staged: dict[int, _Run] = {}
        self._waiting: dict[int, tuple[Sequence[int], int]] = {}
        """By its number, the runs of an update, and the oldest run that was under way then."""
        self._oldest = 0
        self._prepared: dict[int, tuple[list[Key], list[Any]]] = {}
        self._own: set[Key] = set()
        """The arrays that nobody else has, so that some of their rows can be changed in place."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def request(self, message: Message) -> Callable[[], Message]:
        """Returns what answers a worker of this process; as of ``Connection``."""
        return partial(self.answer, message)

    def answer(self, message: Message) -> Message:
        """Does what a worker asks for: to fetch, or to stage."""
        epoch, run, what = message.plain
        if message.name == "stage":
            self.stage(epoch, run, what, message.arrays)
            return Message("staged")
        values = self.fetch(epoch, run, what, message.arrays)
        return Message("void") if values is None else Message("values", arrays=values)

    def load(self, name: str, program: ServerProgram) -> None:
        """Keeps a program, to be named by updates."""
        self._programs[name] = program

    def stage(self, epoch: int, run: int, program: str, sent: Sequence[Any]) -> None:
        """Keeps what a worker computed until its number is known."""
        with self._lock:
            while epoch > self.epoch:  # the coordinator has told it to go back, but it did not yet
                self._changed.wait()
            if epoch == self.epoch and run >= self._oldest:
                self._staged[run] = _Run(program, sent)

    def prepare(self, run: int, keys: Iterable[Key]) -> None:
        """Sets aside the arrays that a run reads, as they are between the updates before and after."""
        with self._lock:
            keys = list(keys)
            self._prepared[run] = keys, [self.state[key] for key in keys]
            self._changed.notify_all()

    def fetch(
        self, epoch: int, run: int, at: Sequence[int] = (), rows: Sequence[Any] = ()
    ) -> list[Any] | None:
        """Returns what was set aside for a run, when it is; None if the servers have gone back meanwhile.

        Of the arrays ``at`` some places it returns ``rows``, by their numbers.
        """
        with self._lock:
            while epoch > self.epoch or (epoch == self.epoch and run not in self._prepared):
                self._changed.wait()
            if epoch != self.epoch:
                return None
            keys, values = self._prepared.pop(run)
            for i, ids in zip(at, rows, strict=True):
                values[i] = _rows_of(values[i], ids)
            self._own -= {key for i, key in enumerate(keys) if i not in at}
            return values

    def commit(self, epoch: int, number: int, runs: Sequence[int], oldest: int) -> None:
        """Applies an update when all earlier ones are applied.

        It is the sum of runs, in the order of their shares. Those before the oldest, the first that was under
        way when the update got its number, were given up if they were staged for no update.
        """
        with self._lock:
            if epoch == self.epoch and number >= self.version:
                self._waiting[number] = runs, oldest
            while self.version in self._waiting:
                # Not when a commit arrives: those of earlier updates may come after it.
                self._apply(*self._waiting.pop(self.version))
                self.version += 1

    def _apply(self, runs: Sequence[int], oldest: int) -> None:
        first, *others = [self._staged.pop(run) for run in runs]
        program, sent = self._programs[first.program], first.sent
        for other in others:
            sent = list(map(operator.add, sent, other.sent))
        apply: Any = program.apply
        touched = {program.reads[i] for i in getattr(apply, "touched", ())}
        if touched and touched <= self._own:
            held = {id(x) for _, values in self._prepared.values() for x in values}
            if held.isdisjoint(id(self.state[k]) for k in touched):
                apply = apply.in_place
        new = apply([self.state[key] for key in program.reads], sent)
        self._own = self._own.difference(program.writes) | touched
        self.state.update(zip(program.writes, new, strict=True))
        self._oldest = max(self._oldest, oldest)
        self._staged = {run: of for run, of in self._staged.items() if run >= self._oldest}

    def assign(self, values: Mapping[Key, Any]) -> None:
        """Sets arrays; for those that are there already, while no update is under way."""
        self.state.update(values)
        self._own.difference_update(values)

    def pull(self, keys: Collection[Key]) -> list[Any]:
        """Returns arrays as they are now."""
        self._own.difference_update(keys)
        return [self.state[key] for key in keys]

    def restore(self, epoch: int, snapshot: Snapshot) -> None:
        """Goes back to a snapshot; what was staged since is void."""
        with self._lock:
            self.version, self.state = snapshot.version, dict(snapshot.state)
            self.epoch, self._oldest = epoch, 0
            self._staged, self._waiting, self._prepared, self._own = {}, {}, {}, set()
            self._changed.notify_all()

    def drop(self, run: int) -> None:
        """Drops what is kept for a run that was given up."""
        with self._lock:
            self._prepared.pop(run, None)
            self._staged.pop(run, None)

    def forget(self, keys: Iterable[Key], programs: Iterable[str] = ()) -> None:
        """Drops arrays that no step reads any more, and programs."""
        for key in keys:
            self.state.pop(key, None)
        for name in programs:
            self._programs.pop(name, None)


def _rows_of(array: Any, ids: Any) -> Any:
    """Returns rows of an array; programs for few numbers of them are compiled."""
    some = np.zeros(1 << max(6, (len(ids) - 1).bit_length()), np.int32)
    some[: len(ids)] = ids
    return np.asarray(_take(array, some))[: len(ids)]


_take = jax.jit(lambda array, ids: array[ids])
