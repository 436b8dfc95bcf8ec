"""Asynchronous training: workers compute, servers store the model and apply the updates."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
from flax import nnx

from distribute_jax._errors import ArgumentError, ArgumentTypeError, UnsupportedError
from distribute_jax._mesh import replica_mesh
from distribute_jax._messages import check_int
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.servers import (
    Coordinator,
    Engine,
    RemoteValue,
    ServersRunner,
    Store,
    in_closure,
    threads,
)
from distribute_jax.strategies._base import Strategy


class ParameterServerStrategy(Strategy):
    """Trains asynchronously: variables are on servers, and workers compute steps, each with its own batch.

    A step is written for one replica, as for any strategy. A worker reads the weights, computes gradients and
    hands them over; the servers apply one update after the other, each exactly once, in the order of one log.
    With ``max_staleness=0`` the result is that of one device on the batches in the order of the log;
    otherwise an update is computed from weights that are at most ``max_staleness`` updates old.

    ``ClusterCoordinator`` schedules steps. :meth:`run` waits for them, and runs its step in the caller's
    thread. The variables of the model hold what the servers had at the last ``join`` or ``run``.

    Args:
        cluster_resolver: not supported yet; None.
        variable_partitioner: decides which variables are divided, by rows, among several servers: one of
            ``dj.experimental.partitioners``, or a function of their shape and dtype that returns the number
            of parts along each dim. None divides none.
        engine: ``"threads"``, the default: the workers are threads of this process.
        workers: how many; by default one for each core, at most 4.
        servers: among how many the variables are divided, one after the other; the state of an optimizer is
            with its parameter.
        max_staleness: the most updates that may come between what a step reads and its own update; by default
            four for each worker. ``math.inf`` for no bound, as in TensorFlow.

    Raises:
        ValueError: an argument is not what it should be.
        NotImplementedError: an option that is not supported yet.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.ParameterServerStrategy(workers=2, max_staleness=0)
        >>> strategy.num_replicas_in_sync
        1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ParameterServerStrategy; Li et al.,
    "Scaling Distributed Machine Learning with the Parameter Server", 2014; Ho et al., "More Effective
    Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        engine: str | None = None,
        workers: int | None = None,
        servers: int | None = None,
        max_staleness: float | None = None,
    ) -> None:
        name = type(self).__name__
        if cluster_resolver is not None:
            raise UnsupportedError(f"{name}: cluster_resolver is not supported yet; leave it out.")
        if not (variable_partitioner is None or callable(variable_partitioner)):
            raise ArgumentTypeError(
                f"{name}: variable_partitioner must be a function of shape and dtype, as those of "
                f"dj.experimental.partitioners; got {variable_partitioner!r:.60}."
            )
        if engine not in (None, "threads"):
            raise ArgumentError(f"{name}: engine must be 'threads'; got {engine!r}.")
        number = (
            min(4, os.cpu_count() or 1)
            if workers is None
            else check_int(f"{name}: workers", workers)
        )
        of_servers = 1 if servers is None else check_int(f"{name}: servers", servers)
        staleness = 4 * number if max_staleness is None else _checked_staleness(name, max_staleness)
        devices = jax.local_devices()
        super().__init__(replica_mesh(devices[:1]), steps_in_flight=None)
        self._stores = [Store() for _ in range(of_servers)]
        self._coordinator = Coordinator(number, self._stores, staleness, devices[0])
        self._runner: ServersRunner = ServersRunner(
            self,
            self._replicas,
            self._coordinator,
            of_servers,
            self._start,
            variable_partitioner,
        )

    def _start(self) -> Engine:
        """Starts the workers; they end with the strategy, or the program."""
        engine = threads(self._coordinator, self._stores, jax.local_devices())
        weakref.finalize(self, engine.stop)
        return engine

    @property
    @final
    def workers(self) -> int:
        """The number of workers."""
        return self._coordinator.workers

    @property
    def _ahead(self) -> int:  # type: ignore[override]
        return 2 * self.workers

    def _dispatch(self, fn: Any, batches: Iterator[Any], steps: int, options: Any) -> Any:
        if options is not None and options.verify == "first":
            return super()._dispatch(fn, batches, 1, options)
        return self._runner.schedule(fn, next(batches), {}, most=self._ahead)

    def _fetched(self, results: Any) -> Any:
        return jax.tree.map(lambda x: x.get() if isinstance(x, RemoteValue) else x, results)

    def _settle(self, variables: Sequence[nnx.Variable[Any]] | None = None) -> None:
        if variables is None:
            self._coordinator.join()
        else:
            self._coordinator.write_back(variables)

    def _enter_program(self, name: str) -> None:
        if not (in_closure() and name == "strategy.run"):
            super()._enter_program(name)

    def _enter_method(self, name: str) -> None:
        if not in_closure():  # where a scheduled function may combine what ``run`` returned
            super()._enter_method(name)


def _checked_staleness(name: str, value: Any) -> float:
    if isinstance(value, float) and value == float("inf"):
        return float("inf")
    return check_int(f"{name}: max_staleness", value, at_least=0)
