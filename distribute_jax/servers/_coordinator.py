"""Closures from ``schedule`` to their results: the queue, errors, and who waits for what.

Workers take work, compute it and hand over what the servers apply; how they are reached is the engine's
concern. One lock guards all that changes; nobody holds it while waiting for another process.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from distribute_jax import _context
from distribute_jax._errors import (
    CancelledError,
    ClusterError,
    DeadlineExceededError,
    StepFailedError,
)
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._messages import error_text
from distribute_jax.program._binding import Binding
from distribute_jax.servers._divide import Placement
from distribute_jax.servers._halves_cache import BoundHalves
from distribute_jax.servers._input import check_not_on_worker
from distribute_jax.servers._state import Program, State
from distribute_jax.servers._updates import Attempt, Log, Update
from distribute_jax.servers._wire import WireError
from distribute_jax.servers._worker import Order

_MAX_LOSSES = 3
"""How often a closure may lose its worker, or a server be lost at one version."""
_MAX_CLOSURES = 262_144
"""How many closures may be unfinished before ``schedule`` blocks, as in TensorFlow."""
_POLL_SECONDS = 0.05


Read = Callable[[int, int], list[Any]]
"""Returns the data that a worker takes for a share of a closure."""


@dataclass(eq=False)
class Closure:
    program: Program
    read: Read
    returned_by_run: dict[int, list[Any]] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    is_over: bool = False
    is_fetched: bool = False
    lost_workers: int = 0
    _data: dict[int, list[Any]] = field(default_factory=dict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def data_of(self, worker: int, share: int) -> list[Any]:
        """Returns what the first worker to run a share has read: no element is lost with a worker."""
        with self._reading:  # that worker may still read when the servers return to a snapshot
            if share not in self._data:
                self._data[share] = self.read(worker, share)
            return self._data[share]


class Stats(NamedTuple):
    """The updates that have been applied so far."""

    version: int
    """The number of updates."""
    staleness: dict[int, int]
    """The number of updates by staleness: how many updates came after the state that they read."""
    applied: tuple[int, ...]
    """The number of updates of each worker; a synchronous one counts for each worker that took part."""


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
        """Takes the device of the user's variables, and seconds between snapshots if servers may be lost."""
        self.workers, self.device = workers, device
        self._log = Log(max_staleness)
        self.stores = stores
        self.state = State(stores, device, self._log, self._wait_for, snapshot_every is not None)
        self._snapshot_every = math.inf if snapshot_every is None else snapshot_every
        self._saved_at = time.monotonic()
        self._servers_down = 0
        self._is_asking, self._until = False, math.inf
        """Whether servers have been asked for state, and the deadline of their answers."""
        self._losses_at_version: Counter[tuple[int, int]] = Counter()
        self._lock = threading.RLock()
        self._for_workers = threading.Condition(self._lock)
        self._for_users = threading.Condition(self._lock)
        self._awaited: list[Callable[[], bool]] = []
        self._error: BaseException | None = None
        self._fatal: BaseException | None = None
        """Why the servers have no state from which training could continue."""
        self._staleness: Counter[int] = Counter()
        self._applied = [0] * workers
        self._stopped = False
        self.faults: Sequence[float] = ()
        """What goes wrong with messages from now on; see ``Order.faults``."""
        _context.register_state_holder(self)

    # Called by the user's thread.

    def known(self, binding: Binding) -> Placement:
        """Returns the servers of leaves that the updates of earlier steps use."""
        with self._lock:
            return self.state.known(binding)

    def load(self, bound: BoundHalves) -> Any:
        """Stores the state of a new step."""
        with self._lock:
            return self._with_servers(lambda: self.state.program(bound))

    def schedule(self, bound: BoundHalves, read: Read, most: int | None, shares: int) -> Closure:
        """Adds a closure; blocks while ``most`` are unfinished, or variables that were written are in use."""
        with self._lock:
            self._raise_error()
            program: Program = self.load(bound)
            bound.fits()  # reads the variables again, which another thread may have updated by a join
            if written := self.state.written(zip(program.keys, bound.leaves, strict=True)):
                self._with_servers(lambda: self._send(written), at_rest=self.state.knows(written))
            most = most or _MAX_CLOSURES
            self._wait_until(lambda: len(self._log.open) < most or self._error is not None)
            self._raise_error()
            closure = Closure(program, read)
            with interrupts_held_back():  # a closure that no worker is woken for would never finish
                self._log.add(closure, shares=shares, writes=program.writes)
                self._for_workers.notify(shares)
            return closure

    def _send(self, written: dict[int, Any]) -> None:
        self._raise_error()
        self.state.send(written)

    def join(self, timeout: float | None = None) -> None:
        """Waits until all closures have finished, updates variables, and raises a closure's first error."""
        check_not_on_worker()
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            try:
                self._with_servers(self.state.write_back, at_rest=True, until=until)
            except TimeoutError:
                n = len(self._log.open)
                what = f"{n} function(s) not finished" if n else "the servers have not answered"
                raise DeadlineExceededError(
                    f"coordinator.join: {what} after {timeout:g} seconds."
                ) from None
            self._raise_error()

    def write_back(self, ids: set[int], after_all: bool = False) -> None:
        """Updates its variables of these ids to one version of the servers, or to that after all closures.

        What was written since the last closure stays. Who has none of its variables gets none of its errors.
        """
        with self._lock:
            if self.state.variables.keys().isdisjoint(ids):
                return
            if after_all:
                self.join()
                return
            self._check_servers()
            self._with_servers(lambda: self.state.write_back(ids))

    def _with_servers(
        self, do: Callable[[], Any], *, at_rest: bool = False, until: float = math.inf
    ) -> Any:
        """Calls what needs the servers, if ``at_rest`` after all closures; again if a server is lost."""
        # Not `while condition`, at whose jump back an interrupt keeps the lock on Python 3.13.
        while True:
            self._wait_until(self._is_settled if at_rest else self._is_served, until)
            self._until = until
            try:
                return do()
            except WireError:
                if self._stopped:  # the strategy is gone, and its servers with it
                    return None
                # Until the engine has noticed that it is lost.
                self._for_workers.wait(_POLL_SECONDS)

    def _is_served(self) -> bool:
        return not (self._servers_down or self._is_asking) or self._stopped

    def _is_settled(self) -> bool:
        return not self._log.open and self._is_served()

    def is_done(self) -> bool:
        check_not_on_worker()
        with self._lock:
            self._raise_error()
            return self._is_settled()

    def result(self, closure: Closure) -> list[Any]:
        check_not_on_worker()
        with self._lock:
            self._wait_until(lambda: closure.is_over)
            if closure.error is not None:
                raise closure.error
            closure.is_fetched = True
            return closure.results

    @property
    def stats(self) -> Stats:
        with self._lock:
            return Stats(self._log.version, dict(self._staleness), tuple(self._applied))

    def _wait_for(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Waits for those answers of servers that are futures; meanwhile no run begins, and nobody asks."""
        futures = [answer for answer in answers if isinstance(answer, Future)]
        if not futures:
            return answers
        epoch, self._is_asking = self._log.epoch, True
        try:
            for future in futures:
                future.add_done_callback(lambda _: self._notify())
            self._wait_until(lambda: all(future.done() for future in futures), self._until)
        finally:
            for future in futures:
                future.cancel()
            self._is_asking = False
            self._notify()
        if epoch != self._log.epoch:
            raise WireError("the servers have returned to a snapshot")
        return [answer.result() if answer in futures else answer for answer in answers]

    def _wait_until(self, is_so: Callable[[], bool], until: float = math.inf) -> None:
        """Waits, noticing interrupts; raises TimeoutError at the deadline."""
        if is_so():
            return
        self._awaited.append(is_so)
        try:
            while not is_so():
                self._check_servers()
                if (remaining := until - time.monotonic()) <= 0:
                    raise TimeoutError
                self._for_users.wait(min(remaining, 1.0))
        finally:
            self._awaited.remove(is_so)

    def _notify(self) -> None:
        """Wakes workers, and users only if what one of them waits for has come: not at each closure."""
        with self._lock:
            self._for_workers.notify_all()
            if self._fatal is not None or any(is_so() for is_so in self._awaited):
                self._for_users.notify_all()

    def _check_servers(self) -> None:
        if (fatal := self._fatal) is not None:
            is_cluster = isinstance(fatal, ClusterError)
            text = str(fatal) if is_cluster else _FATAL.format(reason=error_text(fatal))
            raise (ClusterError if is_cluster else StepFailedError)(text) from fatal

    def _raise_error(self) -> None:
        self._check_servers()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # Called by the threads of the engine.

    def take(self, worker: int) -> tuple[Attempt, Order] | None:
        """Waits for a run, whose state the servers have set aside; None if there will be no more."""
        with self._lock:
            while not self._stopped and worker < self.workers:
                if self._is_served() and (attempt := self._log.admit(worker)) is not None:
                    read = self.state.prepare(attempt.closure.program, attempt.number)
                    return attempt, Order(attempt.epoch, attempt.number, *read, self.faults)
                self._for_workers.wait()
            return None

    def hand_over(self, attempt: Attempt, results: list[Any]) -> None:
        """Applies what a worker has staged, in the order of the log."""
        closure: Closure = attempt.closure
        with self._lock:
            closure.returned_by_run[attempt.number] = results
            if (update := self._log.finish(attempt)) is None:
                return
            if update.number is not None:
                runs = [run.number for run in update.attempts]
                for store in self.stores:
                    store.commit(attempt.epoch, update.number, runs, update.oldest_run)
                self._count(update, 1)
                if self.state.saved_version is None:
                    self._log.forget(self._log.version)
            shares = [closure.returned_by_run[run.number] for run in update.attempts]
            final = closure.program.bound.halves.finish(shares)
            if self.state.recorder is not None and update.number is not None:
                self.state.recorder.updates.append((update, final))
            self._end(closure, results=final)
            is_late = time.monotonic() - self._saved_at > self._snapshot_every
            if is_late and update.number is not None and not self._is_asking:
                self._until, self._saved_at = math.inf, time.monotonic()
                with suppress(WireError):
                    self.state.save()

    def _count(self, update: Update, times: int) -> None:
        self._staleness[update.staleness] += times
        for run in update.attempts:
            self._applied[run.worker] += times

    def lose_server(self, number: int, error: str) -> None:
        """Begins no run until the servers have returned to a snapshot; raises if one keeps ending."""
        with self._lock:
            self._servers_down += 1
            self._losses_at_version[number, self._log.version] += 1
            if self._losses_at_version[number, self._log.version] >= _MAX_LOSSES:
                text = f"The process of server {number} has ended {_MAX_LOSSES} times{error}"
                raise StepFailedError(text)

    def go_back(self) -> None:
        """Takes all servers, of which one is a new process, back to the last snapshot."""
        with self._lock:
            version = self.state.saved_version or 0
            if self.state.recorder is not None:
                self.state.recorder.go_back(version)
            for update in self._log.go_back(version):
                self._count(update, -1)
            self.state.restore(self._log.epoch)
            self._servers_down -= 1
            self._notify()

    def give_up(self, attempt: Attempt, error: BaseException | None = None) -> None:
        """Lets another worker run what one was running, unless it has ended too many with an error."""
        closure: Closure = attempt.closure
        with self._lock:
            self._log.give_up(attempt.worker)
            self._notify()
        closure.lost_workers += error is not None
        if error is not None and closure.lost_workers >= _MAX_LOSSES:
            step, reason = closure.program.bound.step, error_text(error)
            text = _KILLS.format(step=step, n=_MAX_LOSSES, reason=reason)
            self.fail(closure, StepFailedError(text))

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Ends a closure with an error, and cancels those that have not begun."""
        with self._lock:
            if closure not in self._log.open:  # another share of it failed
                return
            self._log.cancel(closure)
            self._error = self._error or error
            self._end(closure, error=error)
            for waiting in self._log.cancel():
                self._end(waiting, error=CancelledError(_CANCELLED))

    def fail_for_good(self, error: BaseException) -> None:
        """Notes why the servers have no state from which training could go on."""
        with self._lock:
            if not self._stopped:  # else the strategy is gone
                self._fatal = error
            self.stop()

    def _end(self, closure: Closure, **outcome: Any) -> None:
        if not closure.is_fetched:  # what was fetched of a closure that runs again stays
            vars(closure).update(outcome, is_over=True)
        self._notify()

    def resize(self, workers: int) -> None:
        with self._lock:
            self.workers = workers
            self._applied += [0] * (workers - len(self._applied))
            self._notify()

    def stop(self) -> None:
        self._stopped = True
        self._notify()


_FATAL = """\
The servers have no state to continue from: {reason}
Make a new strategy and restore the state from a checkpoint."""
_KILLS = """\
{step} was given up after {n} workers that ran it had died: {reason}
Run it on one device to see why: with strategy.run in place of coordinator.schedule."""
_CANCELLED = "The corresponding function is cancelled. Please reschedule the function."
