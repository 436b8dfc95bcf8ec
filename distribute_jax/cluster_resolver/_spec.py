"""The jobs of a cluster, and the addresses of their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from distribute_jax._errors import ArgumentError, ArgumentTypeError

Tasks: TypeAlias = Mapping[int, str] | Sequence[str]
"""The addresses of a job: a list, or a dict by task index."""


class ClusterSpec:
    """The jobs of a cluster, and the address of each of their tasks.

    A task is one process of a job: ``("worker", 1)`` is the second worker. Indices may leave gaps. An
    address is ``host:port``; an empty one means that the task exists and that its address is not known.

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
