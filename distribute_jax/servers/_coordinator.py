"""Closures from ``schedule`` to their results: the queue, the log, errors, and who waits for what.

Workers take work, compute it and hand over what the servers apply; how they are reached is for the engine.
All that changes is guarded by one lock, which nobody holds while another process is waited for.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from flax import nnx

from distribute_jax import _context
from distribute_jax._errors import (
    CancelledError,
    ClusterError,
    ContextError,
    DeadlineExceededError,
    StepFailedError,
)
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._messages import error_text
from distribute_jax.program._binding import Binding
from distribute_jax.program._divide import Homes
from distribute_jax.program._halves_cache import BoundHalves
from distribute_jax.servers._input import check_not_on_worker
from distribute_jax.servers._log import Attempt, Log, Update
from distribute_jax.servers._state import Program, State
from distribute_jax.servers._wire import WireError
from distribute_jax.servers._worker import Order

_MOST_LOSSES, _MOMENT = 3, 0.05
MOST_WAITING = 262_144
"""Closures that may wait; ``schedule`` blocks while there are as many, as in TensorFlow."""


Data = Callable[[int, int], list[Any]]
"""Returns what a worker takes beside state for a share of a closure."""


@dataclass(eq=False)
class Closure:
    """One scheduled call."""

    number: int
    program: Program
    data: Data
    returned: dict[int, list[Any]] = field(default_factory=dict)
    """What a worker has returned, by the number of its run."""
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    is_over: bool = False
    is_fetched: bool = False
    losses: int = 0
    """How many workers were lost after they had been sent it."""
    _data: dict[int, list[Any]] = field(default_factory=dict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def data_of(self, worker: int, share: int) -> list[Any]:
        """Returns the data of the worker that was the first to run it: no element is lost with a worker."""
        with self._reading:  # that worker may still read when the servers have gone back
            if share not in self._data:
                self._data[share] = self.data(worker, share)
            return self._data[share]


class Work(NamedTuple):
    """What a worker does next."""

    attempt: Attempt
    closure: Closure
    order: Order


class Stats(NamedTuple):
    """What has been applied so far."""

    version: int
    """The number of updates."""
    staleness: dict[int, int]
    """How many updates came so many updates after the state that they were computed from."""
    applied: tuple[int, ...]
    """The updates of each worker; of a synchronous one, the runs that it was made of."""


@dataclass
class Recording:
    """Updates with all that they were computed from, for ``run_again``."""

    first: int
    """The version before them."""
    updates: list[tuple[Update, Closure, list[Any]]] = field(default_factory=list)
    written: dict[int, list[dict[int, Any]]] = field(default_factory=dict)
    """By the version, what was set on the servers."""
    last: dict[int, Any] = field(default_factory=dict)
    """What updates change, after the last of them."""

    def write(self, version: int, values: dict[int, Any]) -> None:
        """Notes what is set on the servers."""
        self.written.setdefault(version, []).append(values)


class Coordinator:
    """The closures of one strategy, and the state of its models."""

    def __init__(
        self,
        workers: int,
        stores: Sequence[Any],
        max_staleness: float,
        device: jax.Device,
        *,
        snapshot_every: float | None = None,
    ) -> None:
        """Starts with no closure; the device is that of the user's variables.

        The state of servers that may be lost is kept every ``snapshot_every`` seconds; None for others.
        """
        self.workers, self.device = workers, device
        self._log = Log(max_staleness)
        self._stores = stores
        self.state = State(stores, device, self._answers, may_go_back=snapshot_every is not None)
        self._every = math.inf if snapshot_every is None else snapshot_every
        self._saved_at = time.monotonic()
        self._kept: dict[int, Closure] = {}
        """Closures that are over, and run again if the servers go back."""
        self._lost_servers = 0
        """How many servers are being replaced."""
        self._is_asking, self._until = False, math.inf
        """Whether servers have been asked for what they have, and when their answers are late."""
        self._losses: Counter[tuple[int, int]] = Counter()
        """How often each server was lost at each version."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._awaited_changed = threading.Condition(self._lock)
        """What workers wait for, and what users do."""
        self._awaited: list[Callable[[], bool]] = []
        self._numbers = itertools.count()
        self._closures: dict[int, Closure] = {}
        self._error: BaseException | None = None
        self._lost: BaseException | None = None
        """Why the servers no longer have a state that could be gone on with."""
        self._staleness: Counter[int] = Counter()
        self._applied = [0] * workers
        self._stopped = False
        self._recording: Recording | None = None
        self.faults: Sequence[float] = ()
        """What goes wrong with messages of the orders from now on; see ``Order.faults``."""
        _context.register_state_holder(self)

    # Called by the user's thread.

    def known(self, binding: Binding) -> Homes:
        """Returns the servers of the state that updates use."""
        with self._lock:
            return self.state.known(binding)

    def load(self, bound: BoundHalves) -> Program:
        """Loads the halves of a step into the servers."""
        with self._lock:
            program: Program = self._with_servers(lambda: self.state.program(bound))
            return program

    def schedule(
        self, bound: BoundHalves, data: Data, most: int = MOST_WAITING, shares: int = 1
    ) -> Closure:
        """Adds a closure of so many shares; waits while there are as many that are not over.

        What the user has written into variables since the last closure goes to the servers, when those
        closures that are under way have ended.
        """
        with self._lock:
            self._raise_error()
            program = self.load(bound)
            if written := self.state.written(program):
                knows = self.state.knows(written)
                self._with_servers(lambda: self._send(written), at_rest=knows)
            self._wait_until(lambda: len(self._closures) < most or self._error is not None)
            self._raise_error()
            with interrupts_held_back():  # one that nobody starts would be waited for
                closure = Closure(next(self._numbers), program, data)
                self._closures[closure.number] = closure
                self._log.add(closure.number, shares=shares, writes=program.writes)
                self._changed.notify(shares)
            return closure

    def _send(self, written: dict[int, Any]) -> None:
        self._raise_error()
        self.state.send(written, self._log.version)
        self._forget()

    def join(self, timeout: float | None = None) -> None:
        """Waits until all closures are over, and lets the variables hold what the servers have.

        Raises DeadlineExceededError, or the first error of a closure: those that waited then are cancelled.
        """
        check_not_on_worker()
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            try:
                self._with_servers(self._write_back, at_rest=True, until=until)
            except TimeoutError:
                left = len(self._closures)
                what = f"{left} closures are not over" if left else "the servers have not answered"
                raise DeadlineExceededError(
                    f"coordinator.join: {what} after {timeout:g} seconds."
                ) from None
            self._raise_error()

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Records the updates of the closures that are scheduled in the block, which ends with a join."""
        self.join()
        if self._recording is not None:
            raise ContextError("dj.testing.record: this strategy is being recorded already.")
        with self._lock:
            recording = self._recording = Recording(self._log.version)
            recording.write(self._log.version, self.state.seen)
            self.state.written_to = recording.write
        try:
            yield recording
            self.join()
            with self._lock:
                recording.last = self._with_servers(self.state.changing)
        finally:
            self._recording = self.state.written_to = None

    def write_back(self, variables: Iterable[nnx.Variable[Any]] | None = None) -> None:
        """Lets variables hold what the servers have now, all after the same updates; closures go on.

        What the user has written since the last closure stays.
        """
        with self._lock:
            self._check_servers()
            self._with_servers(lambda: self._write_back(variables))

    def _write_back(self, variables: Iterable[nnx.Variable[Any]] | None = None) -> None:
        version, at_rest = self._log.version, self._log.is_idle
        self.state.write_back(version, variables, at_rest=at_rest)
        self._forget()

    def _with_servers(
        self, do: Callable[[], Any], *, at_rest: bool = False, until: float = math.inf
    ) -> Any:
        """Does what needs the servers, maybe all closures over; again if one of them ends meanwhile."""
        # Not `while condition`, at whose jump back an interrupt keeps the lock on Python 3.13.
        while True:
            self._wait_until(self._is_settled if at_rest else self._is_served, until)
            self._until = until
            try:
                return do()
            except WireError:
                if self._stopped:  # the strategy is gone, and its servers with it
                    return None
                self._changed.wait(_MOMENT)  # a server is gone, which its engine will notice

    def _is_served(self) -> bool:
        return not (self._lost_servers or self._is_asking) or self._stopped

    def _is_settled(self) -> bool:
        return self._log.is_idle and self._is_served()

    def is_done(self) -> bool:
        """Returns whether all closures are over; raises as ``join``."""
        check_not_on_worker()
        with self._lock:
            self._raise_error()
            return self._is_settled()

    def result(self, closure: Closure) -> list[Any]:
        """Waits for what a worker handed over, or raises its error."""
        check_not_on_worker()
        with self._lock:
            self._wait_until(lambda: closure.is_over)
            if closure.error is not None:
                raise closure.error
            closure.is_fetched = True
            return closure.results

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._stores)

    @property
    def stats(self) -> Stats:
        """What has been applied so far."""
        with self._lock:
            return Stats(self._log.version, dict(self._staleness), tuple(self._applied))

    def _answers(self, asked: Sequence[Any]) -> Sequence[Any]:
        """Waits for the servers that are other processes; meanwhile no run begins, and nobody else asks."""
        futures = [answer for answer in asked if isinstance(answer, Future)]
        if not futures:
            return asked
        epoch, self._is_asking = self._log.epoch, True
        try:
            for future in futures:
                future.add_done_callback(self._notice)
            self._wait_until(lambda: all(future.done() for future in futures), self._until)
        finally:
            for future in futures:
                future.cancel()  # those that nobody waits for any longer
            self._is_asking = False
            self._tell()
        if epoch != self._log.epoch:
            raise WireError("the servers have gone back")
        return [answer.result() if answer in futures else answer for answer in asked]

    def _notice(self, _: Future[Any]) -> None:
        with self._lock:
            self._tell()

    def _wait_until(self, is_so: Callable[[], bool], until: float = math.inf) -> None:
        """Waits, so that an interrupt is noticed; raises TimeoutError when it does not come in time."""
        if is_so():
            return
        self._awaited.append(is_so)
        try:
            while not is_so():
                self._check_servers()
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError
                self._awaited_changed.wait(min(left, 1.0))
        finally:
            self._awaited.remove(is_so)

    def _tell(self) -> None:
        """Wakes workers, and users if what one of them waits for is so: not one for each closure."""
        self._changed.notify_all()
        if self._lost is not None or any(is_so() for is_so in self._awaited):
            self._awaited_changed.notify_all()

    def _check_servers(self) -> None:
        if isinstance(self._lost, ClusterError):
            raise ClusterError(str(self._lost)) from self._lost
        if self._lost is not None:
            raise StepFailedError(_LOST.format(reason=error_text(self._lost))) from self._lost

    def _raise_error(self) -> None:
        self._check_servers()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # Called by the workers of the engine.

    def take(self, worker: int) -> Work | None:
        """Waits for work, of which the servers have set aside the state; None when there will be no more."""
        with self._lock:
            while not self._stopped and worker < self.workers:
                can_begin = not (self._lost_servers or self._is_asking)
                if can_begin and (attempt := self._log.admit(worker)) is not None:
                    closure = self._closures[attempt.closure]
                    read = self.state.prepare(closure.program, attempt.number)
                    return Work(
                        attempt, closure, Order(attempt.epoch, attempt.number, *read, self.faults)
                    )
                self._changed.wait()
            return None

    def hand_over(self, work: Work, results: list[Any]) -> None:
        """Applies what a worker has staged, in the order of the log."""
        attempt, returned = work.attempt, work.closure.returned
        with self._lock:
            returned[attempt.number] = results
            if (update := self._log.finish(attempt)) is None:
                return
            if update.number is not None:
                runs = [run.number for run in update.attempts]
                for store in self._stores:
                    store.commit(attempt.epoch, update.number, runs, update.oldest_run)
                self._staleness[update.staleness] += 1
                for run in update.attempts:
                    self._applied[run.worker] += 1
                self._kept[work.closure.number] = work.closure
                self._forget()
            shares = [returned[run.number] for run in update.attempts]
            final = work.closure.program.bound.halves.finish(shares)
            if self._recording is not None and update.number is not None:
                self._recording.updates.append((update, work.closure, final))
            self._over(work.closure, results=final)
            is_late = time.monotonic() - self._saved_at > self._every
            if is_late and update.number is not None and not self._is_asking:
                self._until, self._saved_at = math.inf, time.monotonic()
                with suppress(WireError):
                    self.state.save(self._log.version)
                    self._forget()

    def _forget(self) -> None:
        """Drops what is needed only to go back further than the servers may."""
        saved = self.state.saved
        for closure in self._log.forget(saved.version if saved else self._log.version):
            self._kept.pop(closure, None)

    def lose_server(self, number: int, error: str) -> None:
        """Lets no run begin until the servers have gone back."""
        with self._lock:
            self._lost_servers += 1
            self._losses[number, self._log.version] += 1
            if self._losses[number, self._log.version] >= _MOST_LOSSES:
                text = f"The process of server {number} has ended {_MOST_LOSSES} times{error}"
                self.fail_for_good(StepFailedError(text))

    def go_back(self) -> None:
        """Lets all servers, of which one is another process now, go back to what was kept of them."""
        with self._lock:
            version = self.state.saved.version if self.state.saved else 0
            if self._recording is not None:
                del self._recording.updates[version - self._recording.first :]
            for update in self._log.go_back(version):
                self._staleness[update.staleness] -= 1
                for run in update.attempts:
                    self._applied[run.worker] -= 1
                self._closures[update.closure] = self._kept.pop(update.closure)
            self.state.restore(self._log.epoch)
            self._lost_servers -= 1
            self._tell()

    def give_up(self, worker: int) -> None:
        """Lets another worker run what one was running."""
        with self._lock:
            for attempt in self._log.give_up(worker):
                for store in self._stores:
                    store.drop(attempt.number)
            self._tell()

    def lose(self, work: Work, error: BaseException) -> None:
        """Lets another worker run what a lost one was running."""
        self.give_up(work.attempt.worker)
        work.closure.losses += 1
        if work.closure.losses < _MOST_LOSSES:
            return
        step, reason = work.closure.program.bound.step, error_text(error)
        self.fail(work, StepFailedError(_KILLS.format(step=step, n=_MOST_LOSSES, reason=reason)))

    def fail(self, work: Work, error: BaseException) -> None:
        """Notes that a closure cannot be run; those that wait are cancelled."""
        with self._lock:
            if work.closure.number not in self._closures:  # another share of it failed
                return
            self._log.cancel(work.closure.number)
            self._error = self._error or error
            self._over(work.closure, error=error)
            for number in self._log.cancel():
                self._over(self._closures[number], error=CancelledError(_CANCELLED))

    def fail_for_good(self, error: BaseException) -> None:
        """Notes why the servers have no state to go on with."""
        with self._lock:
            if not self._stopped:  # else the strategy is gone
                self._lost = error
            self._stopped = True
            self._tell()

    def _over(self, closure: Closure, **outcome: Any) -> None:
        if not closure.is_fetched:  # what was fetched of a closure that runs again stays
            vars(closure).update(outcome, is_over=True)
        del self._closures[closure.number]
        self._tell()

    def resize(self, workers: int) -> None:
        """Sets the number of workers; one that is not among them takes no more work."""
        with self._lock:
            self.workers = workers
            self._applied += [0] * (workers - len(self._applied))
            self._tell()

    def stop(self) -> None:
        """Lets the workers end."""
        with self._lock:
            self._stopped = True
            self._tell()


_LOST = """\
The servers have no state to go on with: {reason}
Make a new strategy and restore the state from a checkpoint."""
_KILLS = """\
{step} ended {n} workers one after the other, and was given up: {reason}
Run it on one device to see why: with strategy.run in place of coordinator.schedule."""
_CANCELLED = "The corresponding function is cancelled. Please reschedule the function."
