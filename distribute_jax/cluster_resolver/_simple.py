"""Clusters that the program itself describes: a cluster spec, or the union of several resolvers."""

from __future__ import annotations

from collections.abc import Mapping

from distribute_jax._errors import ArgumentError, TaskConflictError
from distribute_jax.cluster_resolver._base import ClusterResolver, ClusterSpec, with_layer


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program passes as a ``ClusterSpec``.

    Args:
        cluster_spec: the jobs and their addresses.
        master: the value of ``master()`` without a task.
        task_type: the job of this process.
        task_id: its index in the job.
        environment: the value of ``environment``.
        num_accelerators: the value of ``num_accelerators()``; JAX's devices are counted if None.
        rpc_layer: put in front of the address of a task that is asked for.

    Raises:
        ArgumentTypeError: ``cluster_spec`` is not a ``ClusterSpec``; a ``TypeError``.

    Example:
        >>> import distribute_jax as dj
        >>> spec = dj.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> resolver = dj.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (2, 1, 'a:2222')

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SimpleClusterResolver
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that the constructor was passed."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task; the constructor's ``master`` if none is named."""
        if task_type is None or task_id is None:
            return self._master
        return super().master(task_type, task_id, rpc_layer)

    def _accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        if self._num_accelerators is not None:
            return self._num_accelerators
        return super()._accelerators(task_type, task_id)


class UnionResolver(ClusterResolver):
    """The clusters of several resolvers as one.

    If several resolvers have the same job, its tasks are joined: lists are appended in the order of the
    resolvers; if one of them is a dict with gaps, tasks keep their indices. ``master()``, and whatever is
    not passed here, come from the first resolver.

    Args:
        *resolvers: the resolvers, at least one.
        task_type: the job of this process.
        task_id: its index in the joined job; 0 is an index like any other.
        rpc_layer: put in front of addresses.

    Raises:
        ArgumentError: no resolver was given; a ``ValueError``.

    Example:
        >>> import distribute_jax as dj
        >>> from distribute_jax.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> one = SimpleClusterResolver(ClusterSpec({"worker": ["a:2222"]}))
        >>> two = SimpleClusterResolver(ClusterSpec({"worker": ["b:2222"]}))
        >>> dj.cluster_resolver.UnionResolver(one, two).cluster_spec().as_dict()
        {'worker': ['a:2222', 'b:2222']}

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/UnionResolver
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ArgumentError(
                "UnionResolver: at least one ClusterResolver is required; got none."
            )
        self._resolvers = resolvers
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the joined cluster.

        Raises:
            TaskConflictError: two resolvers have different addresses for one index; a ``KeyError``.
        """
        specs = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = {job for spec in specs for job in spec}
        return ClusterSpec({job: _join(job, [s[job] for s in specs if job in s]) for job in jobs})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task; the master of the first resolver if none is named."""
        layer = rpc_layer or self._rpc_layer
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=layer)
        return with_layer(self.cluster_spec().task_address(task_type, task_id), layer)

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._resolvers[0].environment

    def _accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id)

    def _detected_task(self) -> tuple[str | None, int | None]:
        return self._resolvers[0].task_type, self._resolvers[0].task_id

    def _detected_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer


def _join(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    joined: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(joined.keys() & tasks.keys())
        if twice:
            raise TaskConflictError(
                f"UnionResolver: Duplicate keys detected when merging two ClusterSpecs: job {job!r} "
                f"has the tasks {twice} in two clusters, of which one has gaps between its indices."
            )
        joined |= tasks
    return joined
