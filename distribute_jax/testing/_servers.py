"""Tests of parameter servers: ``kill`` and ``disturb_messages`` inject faults; ``record`` and ``replay``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from distribute_jax._checks import check_int, check_number
from distribute_jax._errors import ArgumentError, ContextError, NotEqualError
from distribute_jax._messages import as_numbers, listed
from distribute_jax.servers import Coordinator, Store
from distribute_jax.servers._coordinator import Closure
from distribute_jax.servers._updates import Attempt, Update
from distribute_jax.servers._worker import Order, run
from distribute_jax.strategies._parameter_server import ParameterServerStrategy


@dataclass
class _Recording:
    first: int
    """The version before the updates."""
    updates: list[tuple[Update, list[Any]]] = field(default_factory=list)
    """With the results of each."""
    written: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """What was set on the servers at each version."""
    last: dict[int, Any] = field(default_factory=dict)
    """All arrays after the last update."""

    def note_write(self, version: int, values: dict[int, Any]) -> None:
        self.written[version].append(values)

    def go_back(self, version: int) -> None:
        del self.updates[version - self.first :]


class Log:
    """The updates of a ``record`` block, with everything needed to repeat them."""

    def __init__(self, strategy: ParameterServerStrategy, recording: _Recording) -> None:
        self._strategy, self._recording = strategy, recording

    @property
    def updates(self) -> int:
        """The number of updates."""
        return len(self._recording.updates)

    @property
    def staleness(self) -> dict[int, int]:
        """How many updates had each staleness: the number of updates since their weights were read."""
        return dict(Counter(update.staleness for update, _ in self._recording.updates))

    def __repr__(self) -> str:
        return f"Log(updates={self.updates}, staleness={self.staleness})"


@contextmanager
def record(strategy: ParameterServerStrategy) -> Iterator[Log]:
    """Records the updates of the functions scheduled in the block, for :func:`replay`.

    The block begins and ends with a ``join``. The log keeps the batches of all updates.

    Args:
        strategy: a ``ParameterServerStrategy``.

    Yields:
        The log.

    Raises:
        ValueError: another strategy.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.ParameterServerStrategy(workers=2)
        >>> coordinator = dj.coordinator.ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        >>> def step(x):
        ...     total.assign_add(x)
        >>> with dj.testing.record(strategy) as log:
        ...     for x in (1.0, 2.0):
        ...         coordinator.schedule(step, args=(x,))
        >>> dj.testing.replay(log)
        >>> log.updates
        2
    """
    coordinator, state = strategy._coordinator, strategy._coordinator.state
    coordinator.join()
    if state.recorder is not None:
        raise ContextError("dj.testing.record: this strategy is being recorded already.")
    recording = _Recording(coordinator.stats.version)
    recording.note_write(recording.first, dict(state.seen))
    state.recorder = recording
    try:
        yield Log(strategy, recording)
        coordinator.join()
        recording.last = dict(state.seen)
    finally:
        state.recorder = None


def kill(
    strategy: ParameterServerStrategy, *, worker: int | None = None, server: int | None = None
) -> None:
    """Kills the process of a worker or a server with SIGKILL, to test that training survives it.

    Args:
        strategy: a ``ParameterServerStrategy`` with processes, on which functions have been scheduled.
        worker: the number of a worker.
        server: or that of a server.

    Raises:
        ValueError: not exactly one of the two is passed, or the number is out of range.
        NotImplementedError: the workers are threads.
        RuntimeError: nothing was scheduled yet.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.ParameterServerStrategy(workers=1, engine="processes")
        >>> coordinator = dj.coordinator.ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        >>> def step(x):
        ...     total.assign_add(x)
        >>> for x in (1.0, 2.0, 3.0):
        ...     coordinator.schedule(step, args=(x,))
        >>> dj.testing.kill(strategy, server=0)
        >>> coordinator.join()
        >>> float(total[...])
        6.0
    """
    if (worker is None) == (server is None):
        raise ArgumentError("dj.testing.kill: pass worker= or server=.")
    if not strategy._engine.has_started:
        raise ContextError("dj.testing.kill: workers and servers start with the first closure.")
    kind, number, count = ("server", server, strategy.servers)
    if worker is not None:
        kind, number, count = "worker", worker, strategy.workers
    strategy._engine.kill(kind, check_int(f"dj.testing.kill: {kind}", number, 0, count))


@contextmanager
def disturb_messages(
    strategy: ParameterServerStrategy,
    *,
    lost: float = 0.0,
    duplicated: float = 0.0,
    delayed: float = 0.0,
    seconds: float = 0.01,
    seed: int = 0,
) -> Iterator[None]:
    """Disturbs messages between workers and servers in the block, to test that training survives it.

    A worker that loses a request or a reply reconnects, and its function is scheduled again. A server that
    receives part of an update twice applies it once. Works with every engine.

    Args:
        strategy: a ``ParameterServerStrategy``.
        lost: the fraction of requests, and of replies, that are lost; at most 0.5.
        duplicated: the fraction of the parts of updates that are sent twice.
        delayed: the fraction of requests, and of replies, that are delayed.
        seconds: how long they are delayed.
        seed: determines which messages are disturbed.

    Raises:
        ValueError: an invalid argument.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.ParameterServerStrategy(workers=2)
        >>> coordinator = dj.coordinator.ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        >>> def step(x):
        ...     total.assign_add(x)
        >>> with dj.testing.disturb_messages(strategy, lost=0.25, duplicated=0.25):
        ...     for x in (1.0, 2.0, 3.0):
        ...         coordinator.schedule(step, args=(x,))
        ...     coordinator.join()
        >>> float(total[...])
        6.0
    """
    name = "dj.testing.disturb_messages"
    for argument, value, most in (
        ("lost", lost, 0.5),
        ("duplicated", duplicated, 1.0),
        ("delayed", delayed, 1.0),
        ("seconds", seconds, None),
    ):
        check_number(f"{name}: {argument}", value, at_least=0, most=most)
    check_int(f"{name}: seed", seed, at_least=0)
    coordinator = strategy._coordinator
    before, coordinator.faults = coordinator.faults, (lost, duplicated, delayed, seconds, seed)
    try:
        yield
    finally:
        coordinator.faults = before


def replay(log: Log) -> None:
    """Repeats the updates of a log on one device, one after the other, and compares them bit by bit.

    ``ParameterServerStrategy`` guarantees that a run on many workers equals this. Each update uses the
    version of the weights from which it was first computed, which may be stale. If workers compute on
    another kind of device, or on several each, results can differ by rounding.

    Args:
        log: what :func:`record` yielded, after its block.

    Raises:
        ValueError: results or variables differ in their bits (``NotEqualError``); it names them.

    Example:
        See :func:`record`.
    """
    if lines := list(_differences(log._recording, log._strategy._coordinator)):
        raise NotEqualError(
            f"dj.testing.replay: {log!r} has other bits on one device:\n{listed(lines)}"
        )


def _differences(recording: _Recording, coordinator: Coordinator) -> Iterator[str]:
    """Repeats the updates of a recording one by one on one device; yields what has other bits.

    Each is computed from the version of the state that it was computed from, so servers set aside what its
    runs read as soon as they have that version.
    """
    coordinator.join()
    state, stores = coordinator.state.on(Store)
    readers: defaultdict[int, list[Attempt]] = defaultdict(list)
    orders: dict[int, Order] = {}
    for update, _ in recording.updates:
        state.load(update.closure.program)
        for attempt in update.attempts:
            readers[attempt.pulled].append(attempt)

    def advance(version: int) -> None:
        for values in recording.written.get(version, []):
            state.send(values)
        for attempt in readers[version]:
            read = state.prepare(attempt.closure.program, attempt.number)
            orders[attempt.number] = Order(0, attempt.number, *read)

    for n, (update, expected) in enumerate(recording.updates):
        advance(recording.first + n)
        results = _repeat(update, orders, stores, coordinator.device)
        for store in stores:
            store.commit(0, n, [attempt.number for attempt in update.attempts], 0)
        if any(map(_differ, results, expected)):
            step = update.closure.program.bound.step
            yield f"the results of update {recording.first + n}, a run of {step}"
    advance(recording.first + len(recording.updates))
    yield from (
        state.name(key)
        for key, array in state.changing().items()
        if key in recording.last and _differ(recording.last[key], array)
    )


def _repeat(
    update: Update, orders: dict[int, Order], stores: Sequence[Store], device: jax.Device
) -> list[Any]:
    """Runs the shares of an update, and returns the results of its closure."""
    closure: Closure = update.closure
    shares, links = [], [store.request for store in stores]
    for attempt in update.attempts:
        order, data = orders.pop(attempt.number), closure.data_of(attempt.worker, attempt.share)
        shares.append(run(closure.program.worker, order, data, links, (device, device)))
    return closure.program.bound.halves.finish(shares)


def _differ(one: Any, other: Any) -> bool:
    one, other = (np.asarray(as_numbers(x)) for x in (one, other))
    return bool(one.dtype != other.dtype or one.tobytes() != other.tobytes())
