"""``record`` and ``replay``: an asynchronous training, repeated on one device bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distribute_jax._errors import ArgumentError, NotEqualError
from distribute_jax._messages import listed
from distribute_jax.servers import Recording
from distribute_jax.strategies._parameter_server import ParameterServerStrategy


class Log:
    """The updates of a ``record`` block, with all that they were computed from."""

    def __init__(self, strategy: ParameterServerStrategy, recording: Recording) -> None:
        self._strategy, self._recording = strategy, recording

    @property
    def updates(self) -> int:
        """How many updates it has."""
        return len(self._recording.updates)

    @property
    def staleness(self) -> dict[int, int]:
        """How many updates came so many updates after the state that they were computed from."""
        return dict(Counter(update.staleness for update, _ in self._recording.updates))

    def __repr__(self) -> str:
        return f"Log(updates={self.updates}, staleness={self.staleness})"


@contextmanager
def record(strategy: Any) -> Iterator[Log]:
    """Records the updates of what is scheduled in the block, for :func:`replay`.

    The block begins and ends with a ``join``. The batches of all updates are kept while the log is.

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
        >>> with dj.testing.record(strategy) as log:
        ...     for x in (1.0, 2.0):
        ...         coordinator.schedule(total.assign_add, args=(x,))
        >>> dj.testing.replay(log)
        >>> log.updates
        2
    """
    if not isinstance(strategy, ParameterServerStrategy):
        raise ArgumentError(
            f"dj.testing.record: strategy must be a ParameterServerStrategy; got {strategy!r:.80}."
        )
    with strategy._coordinator.recorded() as recording:
        yield Log(strategy, recording)


def replay(log: Log) -> None:
    """Repeats the updates of a log on one device, one after the other, and compares them bit by bit.

    Each update is computed from the version of the weights that it was computed from before, so that this
    also holds for stale ones: that a run on many workers is what its log says is the promise of
    ``ParameterServerStrategy``. Where workers compute on another kind of device, or on several each, results
    can differ by rounding.

    Args:
        log: what :func:`record` yielded, after its block.

    Raises:
        ValueError: results or variables have other bits (``NotEqualError``); it names them.

    Example:
        See :func:`record`.
    """
    if not isinstance(log, Log):
        raise ArgumentError(
            f"dj.testing.replay: log must be of dj.testing.record; got {log!r:.80}."
        )
    if lines := log._strategy._runner.run_again(log._recording):
        raise NotEqualError(
            f"dj.testing.replay: {log!r} has other bits on one device:\n{listed(lines)}"
        )
