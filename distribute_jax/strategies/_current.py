"""The current strategy and replica context, and the default strategy."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

from distribute_jax import _frames
from distribute_jax._errors import ContextError
from distribute_jax._mesh import replica_mesh
from distribute_jax.program import ReplicaContext
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._scope import Scope


class _OfThread(threading.local):
    scope: Scope | None = None
    """The scope that ``experimental_set_strategy`` has entered."""


_permanent = _OfThread()


def get_strategy() -> Strategy:
    """Returns the current strategy, or the default one outside of every scope.

    Returns:
        The strategy of the innermost scope or ``run`` of this thread.

    Example:
        >>> import distribute_jax as dj
        >>> dj.get_strategy().num_replicas_in_sync
        1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/get_strategy
    """
    return _frames.current().strategy


def has_strategy() -> bool:
    """True if a strategy other than the default one is current.

    Example:
        >>> import distribute_jax as dj
        >>> dj.has_strategy()
        False

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/has_strategy
    """
    return _frames.current().strategy is not _frames.default().strategy


def get_replica_context() -> Any:
    """Returns the replica context, or None in cross-replica context.

    Inside ``run`` it is that of this replica; under the default strategy, that of its only replica; in
    ``scope()`` and ``merge_call`` there is none.

    Returns:
        A ``ReplicaContext`` or None.

    Example:
        >>> import distribute_jax as dj
        >>> dj.get_replica_context().replica_id_in_sync_group
        0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/get_replica_context
    """
    return _frames.current().replica


def in_cross_replica_context() -> bool:
    """True in ``scope()`` and ``merge_call``, outside any replica.

    Example:
        >>> import distribute_jax as dj
        >>> dj.in_cross_replica_context()
        False

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/in_cross_replica_context
    """
    return _frames.current().replica is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current for the rest of the program, without ``with``; None undoes it.

    Args:
        strategy: the strategy, or None for the default one.

    Raises:
        RuntimeError: called inside a scope or inside ``run``.
        ValueError: neither a strategy nor None.

    Example:
        >>> import distribute_jax as dj
        >>> dj.experimental_set_strategy(dj.OneDeviceStrategy("cpu:0"))
        >>> dj.has_strategy()
        True
        >>> dj.experimental_set_strategy(None)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental_set_strategy
    """
    if _permanent.scope is not None and _permanent.scope.is_current():
        _permanent.scope.__exit__(None, None, None)
    elif _frames.entered() is not None:
        raise ContextError(
            "experimental_set_strategy was called inside a strategy scope. Must not be called inside "
            "a `with strategy.scope():` block or a function given to run: leave it first."
        )
    if strategy is not None:
        _permanent.scope = strategy.scope()
        _permanent.scope.__enter__()


class DefaultStrategy(Strategy):
    """One replica on the default device: what is current where no strategy was entered."""

    def __init__(self) -> None:
        super().__init__(replica_mesh(jax.local_devices()[:1]), steps_in_flight=None)


@functools.cache
def default_frame() -> _frames.Frame:
    """Returns the frame of the default strategy, which is made on first use."""
    strategy = DefaultStrategy()
    return _frames.Frame(strategy, ReplicaContext(strategy, bound=False))


_frames.set_default(default_frame)
