"""One server: it stores a part of the state, and applies updates in the order of the log.

What a run computed is staged before its update has a number, and a number may arrive before those of earlier
updates: an update is applied once all earlier ones are. A request that arrives twice changes nothing the
second time. What a worker reads is set aside between two updates, so that all servers return one version.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from distribute_jax.servers._wire import Message

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
