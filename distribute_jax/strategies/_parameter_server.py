"""Asynchronous training: workers compute, servers store the model and apply the updates."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import jax
from flax import nnx

from distribute_jax._checks import check_choice, check_int, check_number, check_optional, refuse
from distribute_jax._errors import ArgumentError, ContextError
from distribute_jax._mesh import replica_mesh
from distribute_jax.cluster_resolver import ClusterResolver, ClusterSpec
from distribute_jax.servers import (
    Cluster,
    Coordinator,
    Engine,
    Processes,
    RemoteStore,
    RemoteValue,
    ServersRunner,
    Store,
    in_closure,
)
from distribute_jax.strategies._base import Strategy

_JOBS = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class ServerOptions:
    """How ``engine="processes"`` and ``"ray"`` recover from lost workers and servers.

    Args:
        snapshot_every: the longest time, in seconds, between snapshots of the servers' state; each ``join``
            takes one too. When a server is lost, all servers return to the last snapshot, and the functions
            since then are run again with their original arguments, which are kept until the next snapshot.
        step_seconds: a worker that takes longer than this for one function is killed and replaced; None for
            no limit. The first run of a function includes compilation.

    Raises:
        ValueError: an argument is not a positive number.

    Example:
        >>> import distribute_jax as dj
        >>> dj.ServerOptions(snapshot_every=10.0)
        ServerOptions(snapshot_every=10.0, step_seconds=None)
    """

    snapshot_every: float = 60.0
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_optional(check_number, f"ServerOptions: {name}", value)


class ParameterServerStrategy(Strategy):
    """Trains asynchronously: servers store the variables, and workers compute steps, each on its own batch.

    A step is written for one replica, as for any strategy. A worker reads the weights, computes gradients and
    sends them to the servers, which apply all updates in one order, each exactly once. With
    ``max_staleness=0`` the result is that of one device that takes the batches in that order;
    otherwise an update is computed from weights that are at most ``max_staleness`` updates old.

    ``ClusterCoordinator`` schedules steps. :meth:`run` waits for them, and runs its step in the caller's
    thread. The model's variables hold the servers' values as of the last ``join`` or ``run``.

    Args:
        cluster_resolver: describes a cluster whose ``chief`` is this process; its ``worker`` and ``ps`` tasks
            call ``dj.Server(…).join()``. The engine is then Ray. None for workers on this machine.
        variable_partitioner: decides into how many parts each variable is divided: one of
            ``dj.experimental.partitioners``, or a function of shape and dtype that returns the number of
            parts along each dim. None divides no variable.
        engine: ``"threads"``, the default: workers are threads of this process. ``"processes"``: workers and
            servers are processes of this machine, which compute in parallel and are replaced if they are
            lost. They run exported programs; none of them listens on a port. ``"ray"``: the same with actors
            of a Ray cluster, also on other machines; ``pip install 'distribute-jax[ray]'``.
        workers: the number of workers; by default one for each core, at most 4.
        servers: the number of servers. Variables are placed on them in turn; the state of an optimizer is on
            the server of its parameter.
        max_staleness: the largest number of updates that may be applied between a step's reading of the
            weights and its own update; by default four for each worker. ``math.inf`` for no bound, as in
            TensorFlow.
        workers_per_update: how many workers compute each update together, in sync: they are the replicas of
            the step, and the servers add up what they send. A batch of ``distribute_dataset`` is divided
            among them, and results equal those of ``MirroredStrategy`` with as many replicas.
        sparse: how a table is updated if a batch looks up only some of its rows: ``"exact"`` as on one
            device; ``"lazy"`` leaves the other rows and their optimizer state unchanged, which is faster, and
            differs for optimizers such as Adam.
        options: for ``engine="processes"`` and ``"ray"``.

    Raises:
        ValueError: an invalid argument.
        MissingPackageError: ``engine="ray"``, and Ray is not installed.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.ParameterServerStrategy(workers=2, max_staleness=0)
        >>> strategy.num_replicas_in_sync
        1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ParameterServerStrategy; Li et al.,
    "Scaling Distributed Machine Learning with the Parameter Server", 2014; Ho et al., "More Effective
    Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    """

    _keeps_local_values = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        engine: str | None = None,
        workers: int | None = None,
        servers: int | None = None,
        max_staleness: float | None = None,
        workers_per_update: int | None = None,
        sparse: str = "exact",
        options: ServerOptions | None = None,
    ) -> None:
        name = type(self).__name__
        check_choice(f"{name}: sparse", sparse, ("exact", "lazy"))
        check_choice(f"{name}: engine", engine, (None, "threads", "processes", "ray"))
        chief = None
        if cluster_resolver is not None:
            tasks, self._resolver = _checked_cluster(name, cluster_resolver), cluster_resolver
            chief = tasks.task_address("chief", *tasks.task_indices("chief"))
            engine = _cluster_value(name, "engine", engine, "ray")
            workers = _cluster_value(name, "workers", workers, tasks.num_tasks("worker"))
            servers = _cluster_value(name, "servers", servers, tasks.num_tasks("ps"))
        workers = min(4, os.cpu_count() or 1) if workers is None else workers
        worker_count = check_int(f"{name}: workers", workers, below=1 << 16)
        server_count = check_int(
            f"{name}: servers", 1 if servers is None else servers, below=1 << 10
        )
        shares = 1 if workers_per_update is None else workers_per_update
        shares = check_int(f"{name}: workers_per_update", shares)
        default_staleness = 4 * worker_count if shares == 1 else 0
        staleness: float = default_staleness if max_staleness is None else max_staleness
        if not (isinstance(staleness, float) and staleness == float("inf")):
            staleness = check_int(f"{name}: max_staleness", staleness, at_least=0)
        if shares > 1 and staleness:
            raise ArgumentError(
                f"{name}: max_staleness={max_staleness!r} with workers_per_update={shares}: workers that "
                "compute an update together read the newest state. Leave max_staleness out."
            )
        devices = jax.local_devices()
        super().__init__(replica_mesh(devices[:1], shares), steps_in_flight=None)
        options = options or ServerOptions()
        if engine in ("processes", "ray"):
            cluster = Cluster(chief) if engine == "ray" else None
            remote = [RemoteStore(devices[0]) for _ in range(server_count)]
            coordinator = Coordinator(
                worker_count, remote, staleness, devices[0], snapshot_every=options.snapshot_every
            )
            self._engine: Engine = Processes(coordinator, options.step_seconds, cluster)
        else:
            stores = [Store() for _ in range(server_count)]
            coordinator = Coordinator(worker_count, stores, staleness, devices[0])
            self._engine = Engine(coordinator, devices)
        self._coordinator = coordinator
        weakref.finalize(self, self._engine.stop)  # also when the program ends
        self._runner: ServersRunner = ServersRunner(
            self,
            self._replicas,
            coordinator,
            self._engine,
            partitioner=variable_partitioner,
            sparse=sparse,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses: the copy would have the same servers."""
        raise ContextError(f"{self!r} cannot be copied. Make a new strategy.")

    @property
    @final
    def workers(self) -> int:
        """The number of workers."""
        return self._coordinator.workers

    @property
    @final
    def servers(self) -> int:
        """The number of servers."""
        return len(self._coordinator.stores)

    @property
    def _max_pending(self) -> int:  # type: ignore[override]
        return 2 * self.workers

    def _dispatch(self, fn: Any, batches: Iterator[Any], steps: int, options: Any) -> Any:
        if options is not None and options.verify == "first":
            return super()._dispatch(fn, batches, 1, options)
        return self._runner.schedule(fn, next(batches), {}, self._max_pending, options)

    def _fetch(self, results: Any) -> Any:
        return jax.tree.map(lambda x: x.get() if isinstance(x, RemoteValue) else x, results)

    def _sync_state(self, variables: Sequence[nnx.Variable[Any]] | None = None) -> None:
        if variables is None:
            self._coordinator.join()
            self._runner.check_skipped_steps()
        else:
            self._coordinator.write_back({*map(id, variables)})

    def add_workers(self, number: int) -> None:
        """Adds workers, also while functions run.

        Args:
            number: how many to add.
        """
        more = check_int("strategy.add_workers: number", number, below=1 << 16)
        self._engine.resize(self.workers + more)

    def remove_workers(self, number: int) -> None:
        """Removes the last workers, after they have finished what they run.

        Args:
            number: how many to remove; at least one worker must remain.
        """
        name, workers = "strategy.remove_workers: number", self.workers
        if (fewer := check_int(name, number)) >= workers:
            refuse(name, f"< strategy.workers = {workers}: the last one cannot be removed", number)
        self._engine.resize(workers - fewer)

    # A scheduled function may run steps, and combine what ``run`` returned, if it runs all of it.
    def _enter_program(self, name: str) -> None:
        if not in_closure() or (name != "strategy.run" and self.num_replicas_in_sync > 1):
            super()._enter_program(name)

    def _enter_method(self, name: str) -> None:
        if not in_closure() or self.num_replicas_in_sync > 1:
            super()._enter_method(name)


def _checked_cluster(name: str, resolver: ClusterResolver) -> ClusterSpec:
    """Returns the cluster; refuses one of which this process is not the chief."""
    cluster, task = resolver.cluster_spec(), resolver.task_type
    indices = {job: cluster.task_indices(job) if job in cluster.jobs else [] for job in _JOBS}
    others, known = set(cluster.jobs) - set(_JOBS), (*_JOBS, None)
    gaps = any(indices[job] != list(range(len(indices[job]))) for job in ("worker", "ps"))
    refusals = {
        "The cluster must not be empty.": not cluster,
        f"Disallowed task type found in cluster spec: {others}. Allowed types are {_JOBS}.": others,
        f"Unrecognized task_type: {task}, valid task types are: {_JOBS}.": task not in known,
        "There must be at most one 'chief' job.": len(indices["chief"]) > 1,
        "There must be at least one ps.": not indices["ps"],
        "There must be at least one worker.": not indices["worker"],
        "The cluster needs a 'chief': the others join it at its address.": not indices["chief"],
        "The indices of workers and of ps must be 0, 1, …, without gaps.": gaps,
        f"Task {task} {resolver.task_id} makes no strategy: the chief does. A worker or ps calls "
        "dj.Server(…).join(), an evaluator dj.SidecarEvaluator(…).start().": task in _JOBS[1:],
    }
    for text, is_refused in refusals.items():
        if is_refused:
            raise ArgumentError(f"{name}: {text}")
    return cluster


def _cluster_value(name: str, argument: str, value: Any, in_cluster: Any) -> Any:
    if value not in (None, in_cluster):
        raise ArgumentError(
            f"{name}: {argument}={value!r} contradicts the cluster, which has {in_cluster!r}. Leave it out."
        )
    return in_cluster
