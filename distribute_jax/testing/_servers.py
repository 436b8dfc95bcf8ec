"""Tests of parameter servers: ``kill`` and ``disturb_messages`` inject faults; ``record`` and ``replay``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from distribute_jax._checks import check_int, check_number
from distribute_jax._errors import ArgumentError, NotEqualError
from distribute_jax._messages import listed
from distribute_jax.servers import Recording
from distribute_jax.strategies._parameter_server import ParameterServerStrategy


class Log:
    """The updates of a ``record`` block, with everything needed to repeat them."""

    def __init__(self, strategy: ParameterServerStrategy, recording: Recording) -> None:
        self._strategy, self._recording = strategy, recording

    @property
    def updates(self) -> int:
        """The number of updates."""
        return len(self._recording.updates)

    @property
    def staleness(self) -> dict[int, int]:
        """How many updates had each staleness: the number of updates since their weights were read."""
        return dict(Counter(update.staleness for update, _, _ in self._recording.updates))

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
    with strategy._coordinator.recorded() as recording:
        yield Log(strategy, recording)


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
    kind, number, count = ("server", server, strategy.servers)
    if worker is not None:
        kind, number, count = "worker", worker, strategy.workers
    strategy._runner.kill(kind, check_int(f"dj.testing.kill: {kind}", number, 0, count))


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
    if lines := log._strategy._runner.run_again(log._recording):
        raise NotEqualError(
            f"dj.testing.replay: {log!r} has other bits on one device:\n{listed(lines)}"
        )
