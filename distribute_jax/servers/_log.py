"""The log of updates: orders them, and admits only runs whose update will not be too stale.

A worker may be lost, and a run may be repeated or reported twice. The log accepts one update for each closure
and gives it the next number. All servers apply updates in this order, so that "after n updates" is the same
state on all of them: for reads, checkpoints and replays. The log knows closures only as keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
    """How many times the servers had gone back to a snapshot."""


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


class Log:
    """Closures that wait or run, and the updates of those that have finished.

    At most ``max_staleness`` updates come between the state that an update was computed from and itself. The
    shares of a closure are computed from one version, and are one update.
    """

    def __init__(self, max_staleness: float) -> None:
        self.max_staleness = max_staleness
        self.version = self.epoch = self.attempts = 0
        """How many updates the state has had, how often servers went back, how many runs have begun."""
        self.open: dict[Any, _Shares] = {}
        """The closures that have not finished."""
        self._waiting: deque[tuple[Any, int]] = deque()
        self._runs: dict[int, Attempt] = {}
        """The runs that are under way, in order; those that are done if their closure has not finished."""
        self._updates: list[tuple[Update, _Shares]] = []
        """The latest updates, whose closures run again if the servers go back."""

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
        """Removes a closure, or all that have not begun; returns those that were removed."""
        begun = {run.closure for run in self._runs.values()}
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
