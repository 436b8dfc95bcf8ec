"""One server: it holds its part of the state, and applies updates in the order of the log.

A run is staged before it gets its number, and its number may arrive before those of earlier updates: it is
applied when all earlier ones are. Requests may be sent twice: the second changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Key = int
"""The number of one array of state."""


@dataclass(frozen=True)
class ServerProgram:
    """What a server does with what workers computed."""

    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    apply: Callable[[list[Any], list[Any]], list[Any]]
    """Returns the new values, from the values that it reads and what the workers sent."""
    add: Callable[[Any, Any], Any]
    """Adds up what two workers sent."""


class Snapshot(NamedTuple):
    """The state after so many updates."""

    version: int
    state: Mapping[Key, Any]


class _Run(NamedTuple):
    program: str
    sent: list[Any]


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

    @property
    def staged(self) -> int:
        """How many runs wait for their number, or for earlier updates."""
        return len(self._staged)

    def load(self, name: str, program: ServerProgram) -> None:
        """Keeps a program, to be named by updates."""
        self._programs[name] = program

    def stage(self, epoch: int, run: int, program: str, sent: list[Any]) -> None:
        """Keeps what a worker computed until its number is known."""
        if epoch == self.epoch and run >= self._oldest:
            self._staged[run] = _Run(program, sent)

    def commit(self, epoch: int, number: int, runs: Sequence[int], oldest: int) -> int:
        """Applies an update when all earlier ones are applied, and returns the version.

        Args:
            epoch: how often the servers had gone back.
            number: of the update.
            runs: what it is the sum of, in the order of their shares.
            oldest: the first run that was under way when the update got its number. Earlier ones that were
                staged for no update were given up.
        """
        if epoch != self.epoch:
            return self.version
        if number >= self.version:
            self._waiting[number] = runs, oldest
        while self.version in self._waiting:
            # Not when a commit arrives: those of earlier updates may come after it.
            self._apply(*self._waiting.pop(self.version))
            self.version += 1
        return self.version

    def _apply(self, runs: Sequence[int], oldest: int) -> None:
        first, *others = [self._staged.pop(run) for run in runs]
        program, sent = self._programs[first.program], first.sent
        for other in others:
            sent = list(map(program.add, sent, other.sent))
        new = program.apply([self.state[key] for key in program.reads], sent)
        self.state.update(zip(program.writes, new, strict=True))
        self._oldest = max(self._oldest, oldest)
        self._staged = {run: of for run, of in self._staged.items() if run >= self._oldest}

    def assign(self, values: Mapping[Key, Any]) -> None:
        """Sets arrays; for those that are there already, while no update is under way."""
        self.state.update(values)

    def pull(self, keys: Iterable[Key]) -> list[Any]:
        """Returns arrays as they are now."""
        return [self.state[key] for key in keys]

    def snapshot(self) -> Snapshot:
        """Returns all of the state; arrays are never changed in place."""
        return Snapshot(self.version, dict(self.state))

    def restore(self, epoch: int, snapshot: Snapshot) -> None:
        """Goes back to a snapshot; what was staged since is void."""
        self.version, self.state = snapshot.version, dict(snapshot.state)
        self.epoch, self._oldest = epoch, 0
        self._staged, self._waiting = {}, {}
