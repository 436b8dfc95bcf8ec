"""The log of updates: it numbers them, and admits only steps that will not be too stale.

Workers compute steps; any of them may be lost, run again, or reported twice. Of each closure the log takes
one update, and gives it the next number. All servers apply the updates in this order, so that "after n
updates" is the same state on all of them: for reads, checkpoints and replays. The log starts no thread and
has no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Attempt(NamedTuple):
    """One worker's run of a closure, or of its share of one."""

    closure: int
    number: int
    """Different for each run."""
    worker: int
    share: int
    """Which part of the closure it computes; 0 where it computes all."""
    pulled: int
    """The version of the state that it reads: the number of updates before."""
    epoch: int
    """How often the servers had gone back to a snapshot."""


class Update(NamedTuple):
    """A finished closure: what all servers apply next."""

    number: int | None
    """The version of the state before it; None where the closure writes no state."""
    closure: int
    attempts: tuple[Attempt, ...]
    """The runs that it is made of, one for each share."""
    oldest_run: int
    """The number of the first run that was under way then; earlier ones are applied or given up."""

    @property
    def staleness(self) -> int:
        """How many updates were applied between what it was computed from and itself."""
        return 0 if self.number is None else self.number - self.attempts[0].pulled


@dataclass(eq=False)
class _Closure:
    shares: int
    writes: bool
    running: dict[int, Attempt] = field(default_factory=dict)
    """The run of each share that is under way."""
    done: dict[int, Attempt] = field(default_factory=dict)


class Log:
    """Closures that wait, that run, and that were applied.

    Every update is at most ``max_staleness`` updates younger than the state that it was computed from. The
    workers compute the shares of a closure from the same version, and they are one update.
    """

    def __init__(self, max_staleness: float) -> None:
        """Starts empty."""
        self.max_staleness = max_staleness
        self.version = self.epoch = 0
        """How many updates the state has had, and how often the servers went back."""
        self._updates: list[tuple[Update, _Closure]] = []
        """The last ones, which run again if the servers go back."""
        self.attempts = 0
        """How many runs have begun."""
        self._open: dict[int, _Closure] = {}
        self._waiting: deque[tuple[int, int]] = deque()
        self._pulled: dict[int, int] = {}
        """For each update under way, the version that it is computed from."""

    @property
    def is_idle(self) -> bool:
        """Whether all closures are finished."""
        return not self._open

    def add(self, closure: int, *, shares: int = 1, writes: bool = True) -> None:
        """Adds a closure, which runs after those that were added before."""
        self._open[closure] = _Closure(shares, writes)
        self._waiting.extend((closure, share) for share in range(shares))

    def admit(self, worker: int) -> Attempt | None:
        """Returns what a worker runs next; None where nothing waits, or it might become too stale."""
        if not self._waiting:
            return None
        closure, share = self._waiting[0]
        this = self._open[closure]
        if not this.writes and len(self._pulled.keys() - {closure}) > self.max_staleness:
            return None  # it would miss more of the updates that were added before
        if (this.writes or this.shares > 1) and closure not in self._pulled:
            if not self._stays_fresh():
                return None
            self._pulled[closure] = self.version
        self._waiting.popleft()
        self.attempts += 1
        pulled = self._pulled.get(closure, self.version)
        attempt = Attempt(closure, self.attempts, worker, share, pulled, self.epoch)
        this.running[share] = attempt
        return attempt

    def _stays_fresh(self) -> bool:
        """Returns whether all updates under way, and one more, keep the bound in whichever order they end."""
        oldest = min(self._pulled.values(), default=self.version)
        return self.version - oldest + len(self._pulled) <= self.max_staleness

    def finish(self, attempt: Attempt) -> Update | None:
        """Notes that a run is staged on all servers; returns the update where its closure is complete.

        A run that was given up, or belongs to an earlier epoch, changes nothing.
        """
        this = self._open.get(attempt.closure)
        if this is None or this.running.get(attempt.share) != attempt:
            return None
        this.done[attempt.share] = this.running.pop(attempt.share)
        if len(this.done) < this.shares:
            return None
        del self._open[attempt.closure]
        runs = tuple(this.done[share] for share in range(this.shares))
        number = self.version if this.writes else None
        update = Update(number, attempt.closure, runs, self._oldest_run())
        self._pulled.pop(attempt.closure, None)
        if this.writes:
            self._updates.append((update, this))
            self.version += 1
        return update

    def _oldest_run(self) -> int:
        begun = [self._open[closure] for closure in self._pulled if closure in self._open]
        runs = [run.number for c in begun for run in (*c.running.values(), *c.done.values())]
        return min(runs, default=self.attempts + 1)

    def give_up(self, worker: int) -> list[Attempt]:
        """Lets others run what a lost worker was running; returns those runs."""
        lost = [
            attempt
            for this in self._open.values()
            for attempt in this.running.values()
            if attempt.worker == worker
        ]
        for attempt in reversed(lost):
            this = self._open[attempt.closure]
            del this.running[attempt.share]
            self._waiting.appendleft((attempt.closure, attempt.share))
            if not this.running and not this.done:
                self._pulled.pop(attempt.closure, None)
        return lost

    def cancel(self, closure: int | None = None) -> list[int]:
        """Removes a closure, or all that have not begun; returns those that were removed."""
        waiting = [c for c, this in self._open.items() if not this.running and not this.done]
        gone = waiting if closure is None else [closure]
        for number in gone:
            del self._open[number]
            self._pulled.pop(number, None)
        self._waiting = deque((c, share) for c, share in self._waiting if c in self._open)
        return gone

    def go_back(self, version: int) -> list[Update]:
        """Takes back all updates from a version on, whose closures run again before those that wait."""
        back = self._updates[version - self._first :]
        del self._updates[version - self._first :]
        self._open = {update.closure: this for update, this in back} | self._open
        for this in self._open.values():
            this.running.clear()
            this.done.clear()
        self._waiting = deque((c, i) for c, this in self._open.items() for i in range(this.shares))
        self._pulled.clear()
        self.version = version
        self.epoch += 1
        return [update for update, _ in back]

    def forget(self, version: int) -> list[int]:
        """Drops what is needed to go back before a version; returns those closures."""
        old, self._updates = (
            self._updates[: version - self._first],
            self._updates[version - self._first :],
        )
        return [update.closure for update, _ in old]

    @property
    def _first(self) -> int:
        """The version that the servers can go back to."""
        return self.version - len(self._updates)
