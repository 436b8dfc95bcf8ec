"""The tasks of a Slurm step, from Slurm's lists of hosts and task counts.

Samples of a list of hosts::

    node7                          one host
    t02n13,t02n41                  two
    node[1-3,05-07,9],gpu-[a,b]    node1 node2 node3 node05 node06 node07 node9 gpu-a gpu-b
    rack[0-1]n[1-2]-ib             rack0n1-ib rack0n2-ib rack1n1-ib rack1n2-ib

Samples of numbers of tasks::

    4            4 tasks on the only host
    2(x3),1      2 on each of three hosts, 1 on the fourth
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from distribute_jax._errors import ArgumentError, ClusterError
from distribute_jax.cluster_resolver._base import MAX_TASKS, WORKER, ClusterResolver, ClusterSpec

PROCID = "SLURM_PROCID"
NUM_TASKS = "SLURM_STEP_NUM_TASKS"
NODELIST = "SLURM_STEP_NODELIST"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
JOB_ID = "SLURM_JOB_ID"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

_PORTS = range(61440, 65536)
"""Above the ports that Linux uses for outgoing connections; JAX's own detection takes the same."""
_SECONDS = 10.0

_gpus_before: dict[str, list[str]] = {}
"""The GPUs before a resolver set CUDA_VISIBLE_DEVICES, by the value it set: a second one divides them too."""


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the Slurm step in which ``srun`` started this process.

    Ranks are assigned to the jobs in the order of their names, and to the hosts as Slurm fills them: in
    blocks, or in turn with ``--distribution=cyclic``. The address of a task is its host, with ``port_base``
    plus the index of the task on that host. The port of process 0 is computed from the ids of the job and
    the step, as in JAX's own detection, so that two jobs on one host use different ports.

    If tasks share the GPUs of a host, making the resolver sets ``CUDA_VISIBLE_DEVICES`` to this task's share,
    before the backend starts. GPUs that Slurm has divided already (``--gpus-per-task``) stay as they are.

    Args:
        jobs: the number of tasks of each job; all are workers if None.
        port_base: the port of the first task on each host.
        gpus_per_node: the number of GPUs of each host; those that this process sees if None.
        gpus_per_task: the number of GPUs of each task; an equal share of the host's if None.
        tasks_per_node: a number for every host, or a dict from hosts to numbers; Slurm's if None.
        auto_set_gpu: whether to set ``CUDA_VISIBLE_DEVICES``.
        rpc_layer: put in front of addresses.

    Raises:
        ClusterError: not in a Slurm step, or it has fewer tasks or GPUs than requested; a ``RuntimeError``.
        ArgumentError: a variable of Slurm is malformed.

    Example:
        >>> import distribute_jax as dj, os
        >>> step = {
        ...     "SLURM_PROCID": "2",
        ...     "SLURM_STEP_NUM_TASKS": "3",
        ...     "SLURM_STEP_NODELIST": "t02n[13,41]",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2,1",
        ... }
        >>> os.environ.update(step)
        >>> resolver = dj.cluster_resolver.SlurmClusterResolver(gpus_per_node=0)
        >>> resolver.cluster_spec().as_dict()
        {'worker': ['t02n13:8888', 't02n13:8889', 't02n41:8888']}
        >>> resolver.get_task_info(), resolver.num_processes, resolver.process_id
        (('worker', 2), 3, 2)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = (PROCID, NUM_TASKS, NODELIST)
    _hint = "Not running inside a Slurm step? Start the program with srun, also inside an sbatch script."

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = self._number(PROCID)
        self._hosts = _host_of_each_rank(self._tasks_on_hosts(tasks_per_node))
        self._jobs = self._checked_jobs(jobs)
        self._check_rank()
        addresses = iter(
            f"{host}:{port_base + self._number_on_host(rank)}"
            for rank, host in enumerate(self._hosts)
        )
        self._spec = ClusterSpec(
            {job: list(itertools.islice(addresses, count)) for job, count in self._jobs.items()}
        )
        tasks = [(job, index) for job, count in self._jobs.items() for index in range(count)]
        self._task_type, self._task_id = tasks[self._rank]
        self._rpc_layer = rpc_layer
        self._gpus_per_task = self._share_of_gpus(gpus_per_node, gpus_per_task, auto_set_gpu)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the step."""
        return self._spec

    def get_task_info(self) -> tuple[str, int]:
        """Returns the job of this process and its index in the job."""
        return self._this_task()

    @property
    def coordinator_address(self) -> str | None:
        """The host of process 0, with a port computed from the ids of job and step."""
        address = super().coordinator_address
        if address is None or JOB_ID not in os.environ:
            return address
        step = os.environ.get("SLURM_STEP_ID", "0")
        number = self._number(JOB_ID) + (int(step) if step.isdigit() else 0)
        return f"{address.rpartition(':')[0]}:{_PORTS[number % len(_PORTS)]}"

    @property
    def local_process_id(self) -> int | None:
        """The index of this process on its host; None if it sees only its share of the GPUs."""
        return None if self._gpus_per_task else self._number_on_host(self._rank)

    def _accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        return {"GPU": self._gpus_per_task}

    def _number_on_host(self, rank: int) -> int:
        return self._hosts[:rank].count(self._hosts[rank])

    def _tasks_on_hosts(self, tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
        """Returns the number of tasks on each host, in the order in which Slurm fills them."""
        if isinstance(tasks_per_node, Mapping):
            return {host: tasks_per_node[host] for host in sorted(tasks_per_node, key=_by_numbers)}
        hosts = expand_hosts(self._variable(NODELIST))
        if tasks_per_node is not None:
            return dict.fromkeys(hosts, tasks_per_node)
        text = self._variable(TASKS_PER_NODE)
        counts = expand_tasks(text)
        if len(counts) != len(hosts):
            raise ClusterError(
                f"SlurmClusterResolver: {NODELIST} names {len(hosts)} host(s), and {TASKS_PER_NODE}={text!r} "
                f"is for {len(counts)}. Both come from srun; do not set them by hand."
            )
        return dict(zip(hosts, counts, strict=True))

    def _checked_jobs(self, jobs: Mapping[str, int] | None) -> dict[str, int]:
        if jobs is None:
            jobs = {WORKER: self._number(NUM_TASKS)}
        if sum(jobs.values()) != len(self._hosts):
            raise ClusterError(
                f"SlurmClusterResolver: Requested {sum(jobs.values())} tasks but only {len(self._hosts)} "
                f"were assigned. Change jobs={dict(jobs)!r}, or srun --ntasks."
            )
        return {job: jobs[job] for job in sorted(jobs)}

    def _check_rank(self) -> None:
        if self._rank >= len(self._hosts):
            raise ClusterError(
                f"SlurmClusterResolver: {PROCID}={self._rank} must be below the number of tasks, "
                f"{len(self._hosts)}."
            )
        # In another order of ranks than the computed one, the other tasks would connect to the wrong host.
        host, computed = os.environ.get("SLURMD_NODENAME"), self._hosts[self._rank]
        if host in self._hosts and host != computed:
            raise ClusterError(
                f"SlurmClusterResolver: rank {self._rank} runs on {host}, and by its place in the list of "
                f"hosts it should run on {computed}. The ranks are placed neither in blocks nor in turn; "
                "start the step with srun --distribution=block."
            )

    def _share_of_gpus(
        self, gpus_per_node: int | None, gpus_per_task: int | None, auto_set_gpu: bool
    ) -> int:
        """Limits this process to its share of the GPUs, unless Slurm has; returns their number."""
        gpus = visible_gpus()
        busiest = max(self._hosts.count(host) for host in set(self._hosts))
        divided = "SLURM_GPUS_PER_TASK" in os.environ or 0 < len(gpus) < busiest
        if divided and gpus_per_node is None and gpus_per_task is None:
            return len(gpus)  # Slurm has divided them
        per_node = len(gpus) if gpus_per_node is None else gpus_per_node
        per_task = per_node // busiest if gpus_per_task is None else gpus_per_task
        if busiest * per_task > per_node:
            raise ClusterError(
                f"SlurmClusterResolver: Requested more GPUs per node than available. {busiest} task(s) on a "
                f"host with {per_task} GPU(s) each, and it has {per_node}. Lower gpus_per_task, or ask Slurm "
                "for more."
            )
        if auto_set_gpu and per_task:
            first = self._number_on_host(self._rank) * per_task
            names = gpus if len(gpus) >= per_node else [str(index) for index in range(per_node)]
            shown = ",".join(names[first : first + per_task])
            os.environ[CUDA_VISIBLE_DEVICES] = shown
            _gpus_before[shown] = gpus
        return per_task


def _host_of_each_rank(tasks_on: dict[str, int]) -> list[str]:
    if os.environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        rounds = range(max(tasks_on.values()))
        return [host for number in rounds for host, count in tasks_on.items() if number < count]
    return [host for host, count in tasks_on.items() for _ in range(count)]


def _by_numbers(host: str) -> list[tuple[int, str]]:
    """A sort key that puts node2 before node10, as Slurm does."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]


_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_PIECE = re.compile(r"\[([^\[\]]+)\]|([^\[\],\s]+)")
_WORD = re.compile(r"[\w.]+", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list, in order and with leading zeros."""
    parts = _OUTSIDE_BRACKETS.split(text.strip())
    return _limited((host for part in parts for host in _hosts(part, text)), text)


def _limited(items: Iterable[Any], text: str) -> list[Any]:
    first = list(itertools.islice(items, MAX_TASKS + 1))
    if len(first) > MAX_TASKS:
        raise ArgumentError(f"{text!r:.200} stands for more than {MAX_TASKS} hosts or tasks.")
    return first


def expand_tasks(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ArgumentError(
                f"The number of tasks on each host is {text!r}; it must be numbers separated by commas, "
                "of which '2(x3)' stands for 2,2,2."
            )
        times = min(int(match[2] or 1), MAX_TASKS + 1)
        counts = _limited([*counts, *itertools.repeat(int(match[1]), times)], text)
    return counts


def _hosts(part: str, text: str) -> Iterator[str]:
    """Returns the hosts of one part, which may hold several brackets."""
    pieces = list(_PIECE.finditer(part))
    if not pieces or "".join(piece[0] for piece in pieces) != part:
        raise _malformed(text, part)
    choices = [_choices(p[1], text) if p[1] is not None else [p[2]] for p in pieces]
    return map("".join, itertools.product(*choices))


def _choices(inside: str, text: str) -> list[str]:
    """Expands the inside of a bracket: ``1-3,05-07,9`` is 1 2 3 05 06 07 9."""
    choices: list[str] = []
    for item in inside.split(","):
        first, _, last = item.partition("-")
        if _WORD.fullmatch(item):
            choices.append(item)
        elif first.isdecimal() and last.isdecimal() and int(first) <= int(last):
            numbers = _limited(range(int(first), int(last) + 1), text)
            choices += [str(i).zfill(len(first)) for i in numbers]
        else:
            raise _malformed(text, f"[{inside}]")
    return choices


def _malformed(text: str, part: str) -> ArgumentError:
    return ArgumentError(
        f"Invalid hostlist format {text!r}: {part!r} is not part of a list of hosts. It must be names with "
        "commas, in which 'node[1-3,7]' stands for node1,node2,node3,node7."
    )


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES.

    If the variable is not set, they are those that ``nvidia-smi`` lists; none without that program.
    """
    listed = os.environ.get(CUDA_VISIBLE_DEVICES)
    if listed is None:
        return [str(index) for index in range(_installed_gpus())]
    if listed in _gpus_before:
        return _gpus_before[listed]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    # CUDA ignores all names after the first invalid one; -1 and NoDevFiles hide GPUs on purpose.
    ends = [i for i, name in enumerate(names) if name in {"-1", "NoDevFiles"}]
    return names[: ends[0]] if ends else names


def _installed_gpus() -> int:
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listed.split())
