"""The base class of cluster resolvers, and helpers for environment variables, ranks and devices."""

from __future__ import annotations

import abc
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax

from distribute_jax._errors import ArgumentError, ClusterError
from distribute_jax.cluster_resolver._spec import ClusterSpec

CHIEF = "chief"
WORKER = "worker"
EVALUATOR = "evaluator"
TRAINING_JOBS = (CHIEF, WORKER)
"""The jobs whose tasks compute together, in the order of their process ids."""


class ClusterResolver(abc.ABC):
    """Knows the cluster that this process is part of.

    A resolver answers TensorFlow's questions, in tasks: ``cluster_spec()``, ``task_type``, ``task_id``,
    ``master()``, ``num_accelerators()``. From these it derives what ``jax.distributed`` needs, in processes:
    ``num_processes``, ``process_id`` and ``coordinator_address``. The chief, if there is one, is process 0;
    the workers follow in the order of their indices. Tasks of other jobs (``ps``, ``evaluator``) are no
    processes of the training job and are not counted; an ``evaluator`` stands alone, as process 0 of 1.

    Making a resolver and asking it starts nothing: no backend (``num_accelerators`` apart, which counts
    JAX's devices), no connection between the processes.

    To describe a cluster in a way of your own, define ``cluster_spec`` and ``master``.

    Example:
        >>> import distribute_jax as dj
        >>> class Fixed(dj.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return dj.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        ...
        ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
        ...         return ""
        >>> resolver = Fixed()
        >>> resolver.task_type, resolver.task_id = "worker", 1
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (2, 1, 'a:2222')

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = ()
    """The environment variables that show, all together, that this resolver has something to say."""

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str = ""
    _training_jobs: tuple[str, ...] = TRAINING_JOBS

    @classmethod
    def is_present(cls) -> bool:
        """Tells whether the surroundings of this process are those that the resolver reads.

        Returns:
            True where all its ``variables`` are set; always False for a resolver that is told the cluster.
        """
        return bool(cls.variables) and len(present(cls.variables)) == len(cls.variables)

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Gives the cluster as it is now.

        Returns:
            The jobs and the addresses of their tasks; an empty one where there is no cluster.
        """

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Gives the address of a task.

        Args:
            task_type: its job; the resolver's own choice if None.
            task_id: its index in the job.
            rpc_layer: put in front as ``rpc_layer://``; that of the resolver if None.

        Returns:
            The address; empty where there is none.
        """

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """Gives the number of accelerators by kind, such as ``{"GPU": 8}``; CPUs do not count.

        This asks JAX for its devices and so starts the backend: call it after the strategy was made.

        Args:
            task_type: the job of a task, or None for the devices of all processes.
            task_id: the index of the task.
            config_proto: accepted for ported code; JAX has no sessions to configure.

        Returns:
            The numbers by kind.

        Raises:
            ArgumentError: JAX was started with fewer processes than the task's.
        """
        del config_proto
        if task_type is None or task_id is None:
            return count_accelerators(jax.devices())
        process = self._process_of(self.cluster_spec(), (task_type, task_id))
        if process >= jax.process_count():
            raise ArgumentError(
                f"{type(self).__name__}.num_accelerators({task_type!r}, {task_id}): this is process "
                f"{process}, and JAX runs with {jax.process_count()} process(es). Make the strategy, "
                "which starts the others, before asking for their devices."
            )
        return count_accelerators(d for d in jax.devices() if d.process_index == process)

    @property
    def environment(self) -> str:
        """The environment that the cluster runs in; empty for most."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process; None where it is not known. May be set."""
        return self._found_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None where it is not known. May be set."""
        return self._found_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """What ``master`` puts in front of addresses; None for nothing. May be set."""
        return self._found_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def num_processes(self) -> int:
        """How many processes train together; 1 for an evaluator, and where there is no cluster."""
        spec = self._own_cluster()
        return len(self._processes(spec)) if spec else 1

    @property
    def process_id(self) -> int:
        """Which of the processes this one is, from 0.

        Raises:
            ClusterError: the resolver does not know which task this is, or the task does not train.
        """
        spec = self._own_cluster()
        return self._process_of(spec, self._own_task()) if spec else 0

    @property
    def coordinator_address(self) -> str | None:
        """Where process 0 is to be met, as ``host:port``; None where there is nobody to meet.

        With several processes None means that only JAX can tell: see ``detection_method``.

        Raises:
            ClusterError: the address of process 0 has no port.
        """
        spec = self._own_cluster()
        if not spec:
            return None
        first = self._processes(spec)[0]
        return with_port(
            spec.task_address(*first), f"{type(self).__name__}: process 0 is task {first}"
        )

    @property
    def detection_method(self) -> str | None:
        """Who in JAX knows what this resolver does not; None if it knows all.

        A ``cluster_detection_method`` of ``jax.distributed.initialize``.
        """
        return None

    @property
    def local_process_id(self) -> int | None:
        """Which of the processes on this machine this one is, from 0; None where it is not known.

        Where processes share a machine whose devices nobody has divided, each takes the one of its number.
        """
        return None

    def _found_task_type(self) -> str | None:
        """Gives the job of this process as the surroundings tell it; what was set wins."""
        return None

    def _found_task_id(self) -> int | None:
        """Gives the index of this process as the surroundings tell it; what was set wins."""
        return None

    def _found_rpc_layer(self) -> str | None:
        """Gives the rpc layer that the surroundings name; what was set wins."""
        return None

    def _own_cluster(self) -> ClusterSpec:
        """Gives the cluster; an empty one where this process stands alone."""
        return ClusterSpec({}) if self.task_type == EVALUATOR else self.cluster_spec()

    def _processes(self, spec: ClusterSpec) -> list[tuple[str, int]]:
        """Gives the tasks that train together, in the order of their process ids."""
        found = [
            (j, i) for j in self._training_jobs if j in spec.jobs for i in spec.task_indices(j)
        ]
        if not found:
            raise ClusterError(
                f"{type(self).__name__}: the cluster {spec!r:.300} has no task that trains. Name the "
                "job of the processes that train 'worker'; one of them may be a job 'chief' of its own."
            )
        check_addresses(spec, found, type(self).__name__)
        return found

    def _process_of(self, spec: ClusterSpec, task: tuple[str, int]) -> int:
        """Gives the process id of a task, or raises for one that does not train."""
        processes = self._processes(spec)
        if task not in processes:
            raise ClusterError(
                f"{type(self).__name__}: task {task!r} is no process of the training job, whose tasks are "
                f"{_some(processes)}. Set task_type and task_id to one of these, or the cluster so "
                "that it has this task. Tasks of the jobs 'ps' and 'evaluator' do not train."
            )
        return processes.index(task)

    def _own_task(self) -> tuple[str, int]:
        """Gives the task of this process, or raises where nobody said which it is."""
        if self.task_type is None or self.task_id is None:
            raise ClusterError(
                f"{type(self).__name__}: the cluster is known, and which of its tasks this process "
                f"is, is not (task_type={self.task_type!r}, task_id={self.task_id!r}). Set both on "
                "the resolver, for example resolver.task_type, resolver.task_id = 'worker', 0."
            )
        return self.task_type, self.task_id


def check_addresses(spec: ClusterSpec, tasks: list[tuple[str, int]], resolver: str) -> None:
    """Refuses two tasks at one address, of which the second could never start."""
    chiefs = [task for task in tasks if task[0] == CHIEF]
    if len(chiefs) > 1:
        raise ClusterError(
            f"{resolver}: the cluster has {len(chiefs)} chiefs, {_some(chiefs)}. There is at most "
            "one; make the others workers."
        )
    seen: dict[str, tuple[str, int]] = {}
    for task in tasks:
        address = spec.task_address(*task)
        if address and address in seen:
            raise ClusterError(
                f"{resolver}: the tasks {seen[address]} and {task} have the same address {address!r}. "
                "Give each process its own; on one machine they differ in the port."
            )
        seen[address] = task


def with_port(address: str, whose: str) -> str:
    """Gives an address of the form ``host:port`` as it is, or raises."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(
            f"{whose}, whose address is {address!r}. The other processes meet there, so it must be "
            "host:port with a port from 1 to 65535, such as 'host0:2222'."
        )
    return address


def with_layer(address: str, rpc_layer: str | None) -> str:
    """Gives an address with ``rpc_layer://`` in front, if there is a layer."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def _some(tasks: list[tuple[str, int]]) -> str:
    shown = ", ".join(map(str, tasks[:8]))
    return f"{shown}, … ({len(tasks)} in all)" if len(tasks) > 8 else shown


def value_of(name: str, resolver: str, hint: str) -> str:
    """Gives a variable that must be set; ``hint`` says who would have set it."""
    if name not in os.environ:
        raise ClusterError(f"{resolver}: {name} not found in environment. {hint}")
    return os.environ[name]


def number_of(name: str, resolver: str, hint: str) -> int:
    """Gives a variable that must be set and hold a number, 0 or more."""
    text = value_of(name, resolver, hint)
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise ClusterError(
            f"{resolver}: {name}={text!r} in the environment must be a number, 0 or more. {hint}"
        )
    return int(text)


def check_rank(rank: int, size: int, names: tuple[str, str], resolver: str) -> None:
    """Refuses a rank that is no rank among so many processes."""
    if rank >= size:
        raise ClusterError(
            f"{resolver}: {names[0]}={rank}, and {names[1]}={size}. Ranks count from 0, so each must be "
            "below the number of processes; the two variables come from different launches."
        )


def present(names: Iterable[str]) -> list[str]:
    """Gives those of the variables that are set."""
    return [name for name in names if name in os.environ]


@dataclass(frozen=True)
class Ranks:
    """One launch as one process sees it."""

    rank: int
    size: int
    first: str
    """The address of rank 0; empty where it is not known."""

    def spec(self) -> ClusterSpec:
        """Gives a cluster of workers, of which only the first one's address is known."""
        return ClusterSpec({WORKER: [self.first, *[""] * (self.size - 1)]})

    def master(self, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
        """Gives the address of a task, that of rank 0 where none is named."""
        if task_type is None or task_id is None:
            task_type, task_id = WORKER, 0
        return with_layer(self.spec().task_address(task_type, task_id), rpc_layer)


_KINDS = {"gpu": "GPU", "cuda": "GPU", "rocm": "GPU"}


class HasPlatform(Protocol):
    """What is asked of a device."""

    @property
    def platform(self) -> str:
        """The name of its backend."""


def count_accelerators(devices: Iterable[HasPlatform]) -> dict[str, int]:
    """Gives the number of devices by TensorFlow's name of their kind; CPUs are no accelerators."""
    kinds = [device.platform for device in devices if device.platform != "cpu"]
    return dict(Counter(_KINDS.get(kind, kind.upper()) for kind in kinds))
