"""``ClusterCoordinator``, and what its closures get and return: ``tf.distribute.coordinator``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from distribute_jax._checks import check_number, converting
from distribute_jax._errors import ArgumentError
from distribute_jax._lazy import publish
from distribute_jax.servers import (
    PerWorkerDataset,
    PerWorkerValue,
    RemoteValue,
    Stats,
    experimental_get_current_worker_index,
)
from distribute_jax.strategies._parameter_server import ParameterServerStrategy

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "Stats",
    "experimental_get_current_worker_index",
]


class ClusterCoordinator:
    """Schedules functions on workers, and waits for them.

    There is one for each strategy: constructing it again returns the same object.

    Args:
        strategy: a ``ParameterServerStrategy``.

    Raises:
        ValueError: another strategy.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> strategy = dj.ParameterServerStrategy(workers=2, max_staleness=0)
        >>> coordinator = dj.coordinator.ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        >>> def step(x):
        ...     total.assign_add(x)
        >>> for x in (1.0, 2.0, 3.0):
        ...     coordinator.schedule(step, args=(x,))
        >>> coordinator.join()
        >>> float(total[...])
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/coordinator/ClusterCoordinator
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Returns the coordinator of a strategy."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise ArgumentError(
                f"ClusterCoordinator: strategy must be a ParameterServerStrategy; got {strategy!r:.80}."
            )
        known: ClusterCoordinator | None = vars(strategy).get("_cluster_coordinator")
        if known is None:
            known = vars(strategy)["_cluster_coordinator"] = super().__new__(cls)
            known._strategy = strategy
        return known

    _strategy: ParameterServerStrategy

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers run the functions."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Queues a function for the next free worker, and returns at once.

        The function is traced here, so an error in it is raised here. It may call ``strategy.run``, which
        then runs as part of it, and take elements of per-worker iterators with ``next``. Its changes to
        variables are applied exactly once.

        Args:
            fn: the function.
            args: positional arguments. Arrays and numbers are read now; per-worker values and iterators are
                those of the worker that runs the function.
            kwargs: keyword arguments.

        Returns:
            What ``fn`` returns, with a ``RemoteValue`` in place of each array.

        Raises:
            ValueError: as for ``strategy.run``.
            TypeError: ``fn`` is not a function, or computes with a ``RemoteValue``, which must be fetched.
            Exception: an earlier scheduled function failed.
        """
        return self._strategy._runner.schedule(fn, () if args is None else args, kwargs or {})

    def join(self, timeout: float | None = None) -> None:
        """Waits until all scheduled functions have finished, and updates variables from the servers.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            DeadlineExceededError: they have not finished in time; a ``TimeoutError``.
            StepsSkippedError: too many steps of an optimizer with ``skip_nonfinite`` were skipped in a row.
            Exception: the first error of a scheduled function; functions that had not begun are cancelled.
        """
        if timeout is not None:
            check_number("coordinator.join: timeout", timeout, at_least=0, most=math.inf)
        self._strategy._coordinator.join(timeout)
        self._strategy._runner.check_skipped_steps()

    def done(self) -> bool:
        """Returns True if all scheduled functions have finished; raises as :meth:`join`."""
        return self._strategy._coordinator.is_done()

    def fetch(self, nest: Any) -> Any:
        """Waits for the remote values of a pytree.

        Args:
            nest: a pytree with remote values, such as a result of :meth:`schedule`.

        Returns:
            The pytree with NumPy arrays in place of remote values; other leaves are unchanged.

        Raises:
            Exception: the error of the function, if it failed.
        """
        is_leaf = lambda x: isinstance(x, (RemoteValue, nnx.Variable))  # noqa: E731
        with converting("coordinator.fetch: nest", nest, "a tree whose keys can be sorted"):
            leaves, structure = jax.tree.flatten(nest, is_leaf=is_leaf)
        fetched = [x.fetch() if isinstance(x, RemoteValue) else x for x in leaves]
        return jax.tree.unflatten(structure, fetched)

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Returns a dataset for each worker, created when the worker first takes an element.

        Args:
            dataset: a function without arguments that returns an iterable, called once for each worker, or an
                iterable, over which each worker iterates separately.

        Returns:
            An iterable; ``iter`` returns an iterator to pass to scheduled functions.
        """
        if isinstance(dataset, Iterator):
            raise ArgumentError(
                "create_per_worker_dataset: dataset is an iterator, of which only one worker could read each "
                "element. Pass a function that makes it."
            )
        make = (lambda _: dataset()) if callable(dataset) else (lambda _: dataset)
        return PerWorkerDataset(make)

    @property
    def stats(self) -> Stats:
        """The updates so far: ``version``, and the number of updates by staleness and by worker."""
        return self._strategy._coordinator.stats


publish(globals(), __all__, "distribute_jax.coordinator")
