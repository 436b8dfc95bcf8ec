"""Resolves the tasks of a Slurm step, from Slurm's lists of hosts and task counts.

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
import shutil
import subprocess
from collections.abc import Mapping
from typing import ClassVar

from distribute_jax._errors import ArgumentError, ClusterError
from distribute_jax.cluster_resolver._base import (
    ClusterResolver,
    check_rank,
    number_of,
    value_of,
    with_layer,
)
from distribute_jax.cluster_resolver._spec import ClusterSpec

PROCID = "SLURM_PROCID"
NUM_TASKS = "SLURM_STEP_NUM_TASKS"
NODELIST = "SLURM_STEP_NODELIST"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
JOB_ID = "SLURM_JOB_ID"
STEP_ID = "SLURM_STEP_ID"
OWN_NODE = "SLURMD_NODENAME"
DISTRIBUTION = "SLURM_DISTRIBUTION"
GPUS_PER_TASK = "SLURM_GPUS_PER_TASK"

_HINT = (
    "Not running inside a Slurm step? Start the program with srun, also inside an sbatch script."
)

_PORTS = range(61440, 65536)
"""Above the ports that Linux gives to outgoing connections; JAX's own detection takes the same."""


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the Slurm step that this process was started in by ``srun``.

    Ranks are handed out to the jobs in the order of their names, and to the hosts in the order in which
    Slurm fills them: block by block, or in turn under ``--distribution=cyclic``. The address of a task is its
    host, with ``port_base`` plus its number on that host. Process 0 is met at a port that is made from
    the ids of the job and the step, as JAX's own detection does, so that two jobs on one host do not meet.

    Where tasks share the GPUs of a host, each is confined to its own by ``CUDA_VISIBLE_DEVICES``, when the
    resolver is made: before the backend starts. GPUs that Slurm has divided itself
    (``--gpus-per-task``), and hosts without any, are left as they are.

    Args:
        jobs: the number of tasks of each job; all are workers if None.
        port_base: the port of the first task on each host.
        gpus_per_node: the GPUs of each host; those that this process sees if None.
        gpus_per_task: the GPUs of each task; an equal share of a host's if None.
        tasks_per_node: a number for every host, or a dict from hosts to numbers; Slurm's if None.
        auto_set_gpu: whether to set ``CUDA_VISIBLE_DEVICES``.
        rpc_layer: put in front of addresses.

    Raises:
        ClusterError: this is no Slurm step, or it has other tasks or GPUs than asked for; a ``RuntimeError``.
        ArgumentError: a variable of Slurm's is malformed.

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
        >>> for name in step:
        ...     del os.environ[name]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = (PROCID, NUM_TASKS, NODELIST)

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
        self._rank = number_of(PROCID, "SlurmClusterResolver", _HINT)
        self._hosts = _layout(_tasks_on_hosts(tasks_per_node))
        self._jobs = _checked_jobs(jobs, len(self._hosts))
        check_rank(self._rank, len(self._hosts), (PROCID, NUM_TASKS), "SlurmClusterResolver")
        self._check_own_host()
        self._spec = self._allocated(port_base)
        self._task_type, self._task_id = self._own_place()
        self._rpc_layer = rpc_layer
        self._gpus_per_task = self._share_of_gpus(gpus_per_node, gpus_per_task, auto_set_gpu)

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``."""
        return self._spec

    def get_task_info(self) -> tuple[str, int]:
        """Gives the job of this process and its index in it.

        Returns:
            ``(task_type, task_id)``.
        """
        return self._own_task()

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: of this task where none is named."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return with_layer(self._spec.task_address(task_type, task_id), rpc_layer or self._rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """See ``ClusterResolver.num_accelerators``: the GPUs of one task, the same for each."""
        return {"GPU": self._gpus_per_task}

    @property
    def coordinator_address(self) -> str | None:
        """See ``ClusterResolver``: the host of process 0, with a port made from the ids of job and step."""
        address = super().coordinator_address
        if address is None or JOB_ID not in os.environ:
            return address
        job = number_of(JOB_ID, "SlurmClusterResolver", _HINT)
        step = os.environ.get(STEP_ID, "0")
        number = job + (int(step) if step.isdigit() else 0)
        return f"{address.rpartition(':')[0]}:{_PORTS[number % len(_PORTS)]}"

    @property
    def local_process_id(self) -> int | None:
        """See ``ClusterResolver``; None where this process sees its own GPUs only."""
        return None if self._gpus_per_task else self._number_on_host(self._rank)

    def _number_on_host(self, rank: int) -> int:
        return self._hosts[:rank].count(self._hosts[rank])

    def _allocated(self, port_base: int) -> ClusterSpec:
        addresses = iter(
            f"{host}:{port_base + self._number_on_host(rank)}"
            for rank, host in enumerate(self._hosts)
        )
        return ClusterSpec(
            {job: list(itertools.islice(addresses, count)) for job, count in self._jobs.items()}
        )

    def _own_place(self) -> tuple[str, int]:
        names = [(job, index) for job, count in self._jobs.items() for index in range(count)]
        return names[self._rank]

    def _check_own_host(self) -> None:
        """Refuses an order of ranks that is not the one computed, as the others would look elsewhere."""
        own, computed = os.environ.get(OWN_NODE), self._hosts[self._rank]
        if own in self._hosts and own != computed:
            raise ClusterError(
                f"SlurmClusterResolver: rank {self._rank} runs on {own}, and by its place in the list "
                f"of hosts it should run on {computed}. The ranks lie neither in blocks nor in turn; "
                "start the step with srun --distribution=block."
            )

    def _share_of_gpus(
        self, gpus_per_node: int | None, gpus_per_task: int | None, auto_set_gpu: bool
    ) -> int:
        """Confines this process to its GPUs, if they are not yet divided; gives their number."""
        gpus = visible_gpus()
        busiest = max(self._hosts.count(host) for host in set(self._hosts))
        divided = GPUS_PER_TASK in os.environ or 0 < len(gpus) < busiest
        if divided and gpus_per_node is None and gpus_per_task is None:
            return len(gpus)  # Slurm has given each task its own
        per_node = len(gpus) if gpus_per_node is None else gpus_per_node
        per_task = per_node // busiest if gpus_per_task is None else gpus_per_task
        if busiest * per_task > per_node:
            raise ClusterError(
                f"SlurmClusterResolver: Requested more GPUs per node than available. {busiest} "
                f"task(s) on a host with {per_task} GPU(s) each, and it has {per_node}. Lower "
                "gpus_per_task, or ask Slurm for more."
            )
        if auto_set_gpu and per_task:
            first = self._number_on_host(self._rank) * per_task
            names = gpus if len(gpus) >= per_node else [str(index) for index in range(per_node)]
            confine_to(names[first : first + per_task])
        return per_task


def _tasks_on_hosts(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """Gives the number of tasks on each host, in the order in which Slurm fills them."""
    if isinstance(tasks_per_node, Mapping):
        return {host: tasks_per_node[host] for host in sorted(tasks_per_node, key=_by_numbers)}
    hosts = expand_hosts(value_of(NODELIST, "SlurmClusterResolver", _HINT))
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, tasks_per_node)
    text = value_of(TASKS_PER_NODE, "SlurmClusterResolver", _HINT)
    counts = expand_tasks(text)
    if len(counts) != len(hosts):
        raise ClusterError(
            f"SlurmClusterResolver: {NODELIST} names {len(hosts)} host(s), and "
            f"{TASKS_PER_NODE}={text!r} is for {len(counts)}. Both come from srun; do not set them by hand."
        )
    return dict(zip(hosts, counts, strict=True))


def _layout(tasks_on: dict[str, int]) -> list[str]:
    """Gives the host of each rank."""
    if os.environ.get(DISTRIBUTION, "").startswith("cyclic"):
        rounds = range(max(tasks_on.values()))
        return [host for number in rounds for host, count in tasks_on.items() if number < count]
    return [host for host, count in tasks_on.items() for _ in range(count)]


def _checked_jobs(jobs: Mapping[str, int] | None, tasks: int) -> dict[str, int]:
    if jobs is None:
        jobs = {"worker": number_of(NUM_TASKS, "SlurmClusterResolver", _HINT)}
    for job, count in jobs.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ArgumentError(
                f"SlurmClusterResolver(jobs={dict(jobs)!r}): the number of tasks of {job!r} must be "
                "an int, 0 or more."
            )
    if sum(jobs.values()) != tasks:
        raise ClusterError(
            f"SlurmClusterResolver: Requested {sum(jobs.values())} tasks but only {tasks} were assigned. "
            f"jobs={dict(jobs)!r} must name as many tasks as the hosts of the step run; change it, or "
            "srun --ntasks."
        )
    return {job: jobs[job] for job in sorted(jobs)}


def _by_numbers(host: str) -> list[tuple[int, str]]:
    """Sorts node2 before node10, as Slurm does."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]


_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_PIECE = re.compile(r"\[([^\[\]]+)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)
_WORD = re.compile(r"[\w.]+", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)

_MOST_HOSTS = 1 << 20
"""More than any cluster has; a list that names more holds a slip of the pen, and would fill the memory."""


def expand_hosts(text: str) -> list[str]:
    """Gives the hosts of a list, in its order; digits keep their zeros in front."""
    return [host for part in _OUTSIDE_BRACKETS.split(text.strip()) for host in _hosts(part, text)]


def expand_tasks(text: str) -> list[int]:
    """Gives the number of tasks on each host."""
    found = [_TASKS.fullmatch(part.strip()) for part in text.split(",")]
    counts: list[int] = []
    for match in found:
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise ArgumentError(
                f"The number of tasks on each host is {text!r}; it must be numbers with commas, "
                "of which '2(x3)' stands for 2,2,2."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _hosts(part: str, text: str) -> list[str]:
    """Gives the hosts of one part, which may hold several brackets."""
    pieces = list(_PIECE.finditer(part))
    if not pieces or "".join(piece[0] for piece in pieces) != part:
        raise _malformed(text, part)
    choices = [_choices(p[1], text) if p[1] is not None else [p[2]] for p in pieces]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _choices(inside: str, text: str) -> list[str]:
    """Gives what a bracket stands for: ``1-3,05-07,9`` is 1 2 3 05 06 07 9."""
    found: list[str] = []
    for item in inside.split(","):
        numbers = _RANGE.fullmatch(item)
        if numbers:
            found += _numbers(numbers[1], numbers[2], text)
        elif _WORD.fullmatch(item):
            found.append(item)
        else:
            raise _malformed(text, f"[{inside}]")
    return found


def _numbers(first: str, last: str, text: str) -> list[str]:
    if not 0 <= int(last) - int(first) < _MOST_HOSTS:
        raise _malformed(text, f"{first}-{last}")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _malformed(text: str, part: str) -> ArgumentError:
    return ArgumentError(
        f"Invalid hostlist format {text!r}: {part!r} is no part of a list of hosts. It must be names with "
        "commas, in which 'node[1-3,7]' stands for node1,node2,node3,node7."
    )


CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

_SECONDS = 10.0

_undivided: dict[str, list[str]] = {}
"""By the value that was set, the GPUs as they were before: a second resolver divides the same ones."""


def visible_gpus() -> list[str]:
    """Gives the GPUs that this process was given, by the names that CUDA_VISIBLE_DEVICES takes.

    Where the variable is not set, these are all that ``nvidia-smi`` lists; none without that program.
    """
    listed = os.environ.get(CUDA_VISIBLE_DEVICES)
    if listed is None:
        return [str(index) for index in range(_installed_gpus())]
    if listed in _undivided:
        return _undivided[listed]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    # CUDA takes the names up to the first that stands for no GPU, which -1 and NoDevFiles say on purpose.
    ends = [i for i, name in enumerate(names) if name in {"-1", "NoDevFiles"}]
    return names[: ends[0]] if ends else names


def confine_to(gpus: list[str]) -> None:
    """Lets this process, whose backend has not started, see these GPUs only."""
    before = visible_gpus()
    os.environ[CUDA_VISIBLE_DEVICES] = ",".join(gpus)
    _undivided[os.environ[CUDA_VISIBLE_DEVICES]] = before


def _installed_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    asked = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(done.stdout.split()) if done.returncode == 0 else 0
