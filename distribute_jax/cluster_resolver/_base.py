"""The base class of cluster resolvers; the jobs of a cluster, and the addresses of their tasks."""

from __future__ import annotations

import abc
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax

from distribute_jax._errors import ArgumentError, ArgumentTypeError, ClusterError

Tasks: TypeAlias = Mapping[int, str] | Sequence[str]
"""The addresses of a job: a list, or a dict by task index."""


class ClusterSpec:
    """The jobs of a cluster, and the address of each of their tasks.

    A task is one process of a job: ``("worker", 1)`` is the second worker. Indices may leave gaps. An
    address is ``host:port``, with an IPv6 address ``[::1]:port``; an empty one means that the task exists
    and that its address is not known.

    Args:
        cluster: a ``ClusterSpec``, or a dict from the name of a job to the list of its addresses, or to a
            dict from the index of a task to its address.

    Raises:
        ArgumentTypeError: ``cluster`` has another form; a ``TypeError``.
        ArgumentError: at a call: there is no such job or task. A ``ValueError``.

    Example:
        >>> import distribute_jax as dj
        >>> spec = dj.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {3: "c:2222"}})
        >>> spec.num_tasks("worker"), spec.task_address("ps", 3)
        (2, 'c:2222')
        >>> spec.as_dict()
        {'ps': {3: 'c:2222'}, 'worker': ['a:2222', 'b:2222']}

    Source: https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Tasks]) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        self._jobs = {job: _tasks(job, cluster[job]) for job in sorted(cluster, key=str)}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, sorted."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job, without counting gaps."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the sorted indices of the tasks of a job."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ArgumentError(
                f"No task with index {task_index!r} in job {job_name!r}: its tasks are "
                f"{', '.join(map(str, tasks)) or 'none'}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns a list with the address of task i at position i, and None where there is no task."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns for each job the list of its addresses or, if its indices have gaps, a dict by index."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            try:
                other = ClusterSpec(other)
            except ArgumentError:
                return False
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to dicts, which have no hash either

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ArgumentError(
                f"No such job in cluster: {job_name!r}. Its jobs are "
                f"{', '.join(map(repr, self._jobs)) or 'none'}."
            )
        return self._jobs[job_name]


def _tasks(job: object, tasks: object) -> dict[int, str]:
    """Returns the addresses of a job by index, sorted."""
    by_index = dict(enumerate(tasks)) if isinstance(tasks, (list, tuple)) else tasks
    if not (
        isinstance(job, str)
        and isinstance(by_index, Mapping)
        and all(type(i) is int and i >= 0 and isinstance(at, str) for i, at in by_index.items())
    ):
        raise ArgumentTypeError(
            f"ClusterSpec, job {job!r}: the name of a job must be a string, and its tasks a list of "
            "addresses such as 'host:2222', or a dict from the index of a task, an int >= 0, to its address; "
            f"got {tasks!r:.200}."
        )
    return dict(sorted(by_index.items()))


CHIEF = "chief"
WORKER = "worker"
EVALUATOR = "evaluator"
MAX_TASKS = 1 << 20
"""More than any cluster has; the list of a larger number would fill the memory."""
_ACCELERATORS = {"gpu": "GPU", "cuda": "GPU", "rocm": "GPU"}


class ClusterResolver(abc.ABC):
    """Describes the cluster that this process is part of.

    A resolver has TensorFlow's methods, about tasks: ``cluster_spec()``, ``task_type``, ``task_id``,
    ``master()``, ``num_accelerators()``. From these it derives what ``jax.distributed`` needs, in processes:
    ``num_processes``, ``process_id`` and ``coordinator_address``. The chief, if there is one, is process 0;
    the workers follow in the order of their indices. Tasks of other jobs (``ps``, ``evaluator``) are not
    processes of the training job and are not counted; an ``evaluator`` stands alone, as process 0 of 1.

    A resolver connects no processes and starts no backend (except ``num_accelerators``, which counts JAX's
    devices). To describe another kind of cluster, define ``cluster_spec``.

    Example:
        >>> import distribute_jax as dj
        >>> class Fixed(dj.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return dj.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> resolver = Fixed()
        >>> resolver.task_type, resolver.task_id = "worker", 1
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (2, 1, 'a:2222')

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = ()
    """The environment variables that are all set if a process is in such a cluster."""

    _hint: ClassVar[str] = ""
    """What to do if a variable is missing or malformed."""

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str = ""
    _training_jobs: tuple[str, ...] = (CHIEF, WORKER)
    """The jobs whose tasks compute together, in the order of their process ids."""

    @classmethod
    def is_present(cls) -> bool:
        """True if this process runs in such a cluster: if all ``variables`` are set.

        Always False for a resolver that takes the cluster as an argument.
        """
        return bool(cls.variables) and all(name in os.environ for name in cls.variables)

    _SET_TASK = (
        "Set both on the resolver, for example resolver.task_type, resolver.task_id = 'worker', 0."
    )
    """What to do if the cluster is known but not the task of this process."""

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs and the addresses of their tasks; an empty ``ClusterSpec`` without a cluster."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task.

        Args:
            task_type: the job of the task. If None, that of the default task: this process or, where only
                the first address is known, the first.
            task_id: the index of the task in its job; that of the default task if None.
            rpc_layer: put in front as ``rpc_layer://``; the resolver's ``rpc_layer`` if None.

        Returns:
            The address; empty if it is not known.
        """
        default_type, default_id = self._default_task()
        task_type = default_type if task_type is None else task_type
        task_id = default_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return with_layer(
            self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer
        )

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> Mapping[str, int]:
        """Returns the number of accelerators by kind, such as ``{"GPU": 8}``; CPUs do not count.

        This starts the backend, so call it after the strategy was made.

        Args:
            task_type: the job of a task, or None for the devices of all processes.
            task_id: the index of the task.
            config_proto: accepted for ported code; JAX has no sessions to configure.

        Returns:
            The numbers by kind.

        Raises:
            ArgumentError: JAX was started with fewer processes than the task's.
        """
        return self._accelerators(task_type, task_id)

    @property
    def environment(self) -> str:
        """The environment that the cluster runs in; empty for most."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is not known. May be set."""
        return self._detected_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is not known. May be set."""
        return self._detected_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """What ``master`` puts in front of addresses; None for nothing. May be set."""
        return self._detected_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def num_processes(self) -> int:
        """How many processes train together; 1 for an evaluator, and where there is no cluster."""
        spec = self._training_cluster()
        return len(self._processes(spec)) if spec else 1

    @property
    def process_id(self) -> int:
        """Which of the processes this one is, from 0.

        Raises:
            ClusterError: the resolver does not know which task this is, or the task does not train.
        """
        spec = self._training_cluster()
        return self._process_of(spec, self._this_task()) if spec else 0

    @property
    def coordinator_address(self) -> str | None:
        """The address at which process 0 listens, as ``host:port``; None for a single process.

        With several processes, None means that only JAX can find it: see ``detection_method``.

        Raises:
            ClusterError: the address of process 0 has no port.
        """
        spec = self._training_cluster()
        if not spec:
            return None
        first = self._processes(spec)[0]
        return with_port(
            spec.task_address(*first), f"{type(self).__name__}: process 0 is task {first}"
        )

    @property
    def detection_method(self) -> str | None:
        """The ``cluster_detection_method`` by which ``jax.distributed.initialize`` finds process 0.

        None if the resolver knows the address itself.
        """
        return None

    @property
    def local_process_id(self) -> int | None:
        """The index of this process among those of this machine; None if it is not known.

        Where several processes share a machine and nothing has divided its devices, each process uses the
        device with its index.
        """
        return None

    def _detected_task(self) -> tuple[str | None, int | None]:
        """Returns the task of this process according to the environment."""
        return None, None

    def _detected_rpc_layer(self) -> str | None:
        return None

    def _default_task(self) -> tuple[str | None, int | None]:
        """Returns the task whose address ``master()`` returns by default."""
        return self.task_type, self.task_id

    def _accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        if task_type is None or task_id is None:
            return count_by_kind(jax.devices())
        process = self._process_of(self.cluster_spec(), (task_type, task_id))
        if process >= jax.process_count():
            raise ArgumentError(
                f"{type(self).__name__}.num_accelerators({task_type!r}, {task_id}): this is process "
                f"{process}, and JAX runs with {jax.process_count()} process(es). Make the strategy, "
                "which connects the processes, before asking for their devices."
            )
        return count_by_kind(d for d in jax.devices() if d.process_index == process)

    def _training_cluster(self) -> ClusterSpec:
        """Returns the cluster; an empty one for an evaluator, which stands alone."""
        return ClusterSpec({}) if self.task_type == EVALUATOR else self.cluster_spec()

    def _processes(self, spec: ClusterSpec) -> list[tuple[str, int]]:
        """Returns the tasks that train together, in the order of their process ids."""
        name = type(self).__name__
        jobs = [job for job in self._training_jobs if job in spec.jobs]
        tasks = [(job, index) for job in jobs for index in spec.task_indices(job)]
        if not tasks:
            raise ClusterError(
                f"{name}: the cluster {spec!r:.300} has no task that trains. Call the job of the "
                "processes that train 'worker'; one of them may be in a job 'chief'."
            )
        addresses = Counter(address for task in tasks if (address := spec.task_address(*task)))
        for address, number in addresses.items():
            if number > 1:  # the second process could not listen there
                raise ClusterError(f"{name}: {number} tasks have the same address {address!r}.")
        return tasks

    def _process_of(self, spec: ClusterSpec, task: tuple[str, int]) -> int:
        processes = self._processes(spec)
        if task not in processes:
            shown = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
            raise ClusterError(
                f"{type(self).__name__}: task {task!r} is not one of the {len(processes)} tasks that "
                f"train, {shown}. Set task_type and task_id to one of these, or change the cluster. "
                "Tasks of the jobs 'ps' and 'evaluator' do not train."
            )
        return processes.index(task)

    def _this_task(self) -> tuple[str, int]:
        if self.task_type is None or self.task_id is None:
            raise ClusterError(
                f"{type(self).__name__}: the cluster is known, but not which of its tasks this process "
                f"is (task_type={self.task_type!r}, task_id={self.task_id!r}). {self._SET_TASK}"
            )
        return self.task_type, self.task_id

    def _variable(self, name: str) -> str:
        """Returns an environment variable that must be set."""
        if text := os.environ.get(name, "").strip():
            return text
        missing = "is empty" if name in os.environ else "not found in environment"
        raise ClusterError(f"{type(self).__name__}: {name} {missing}. {self._hint}")

    def _number(self, name: str) -> int:
        """Returns an environment variable that must be an int >= 0."""
        text = self._variable(name)
        if not text.isdecimal():
            raise ClusterError(
                f"{type(self).__name__}: {name}={text!r} must be an int >= 0. {self._hint}"
            )
        return int(text)

    def _rank_and_size(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """Returns two environment variables, of which the first must be below the second."""
        rank, size = self._number(rank_name), self._number(size_name)
        if size > MAX_TASKS:
            raise ClusterError(
                f"{type(self).__name__}: {size_name}={size} must be at most {MAX_TASKS}."
            )
        if rank >= size:
            raise ClusterError(
                f"{type(self).__name__}: {rank_name}={rank} must be below {size_name}={size}. "
                "Do the two variables come from different launches?"
            )
        return rank, size


def with_port(address: str, whose: str) -> str:
    """Returns an address of the form ``host:port`` as it is, or raises."""
    host, _, port = address.rpartition(":")
    is_host = host and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    if not (is_host and port.isdecimal() and 0 < int(port) < 65536):
        raise ClusterError(
            f"{whose}, whose address is {address!r}. The other processes connect to it, so it must be "
            "host:port with a port from 1 to 65535, such as 'host0:2222', or '[::1]:2222' with an IPv6 "
            "address."
        )
    return address


def host_port(host: str, port: int) -> str:
    """Returns ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"


def with_layer(address: str, rpc_layer: str | None) -> str:
    """Returns an address with ``rpc_layer://`` in front, if there is a layer."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def count_by_kind(devices: Iterable[Any]) -> dict[str, int]:
    """Returns the number of accelerators by TensorFlow's name of their kind."""
    kinds = [device.platform for device in devices if device.platform != "cpu"]
    return dict(Counter(_ACCELERATORS.get(kind, kind.upper()) for kind in kinds))
