"""Launchers that number the processes: torchrun, mpirun, ``distribute-jax launch``, and SageMaker."""

from __future__ import annotations

import abc
import json
import os
import re
from typing import ClassVar

from distribute_jax._checks import converting
from distribute_jax._errors import ClusterError
from distribute_jax._supervision import ADDRESS, LOCAL_PROCESS_ID, NUM_PROCESSES, PROCESS_ID
from distribute_jax.cluster_resolver._base import (
    WORKER,
    ClusterResolver,
    ClusterSpec,
    host_port,
)


class RankClusterResolver(ClusterResolver):
    """Base class for launchers that number the processes; all are workers, and only rank 0 has an address."""

    _rank_names: ClassVar[tuple[str, str]]
    """The variables with the rank and with the number of processes."""
    _local_rank_name: ClassVar[str]

    def __init__(self, rpc_layer: str | None = None) -> None:
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers, of which only the first has an address."""
        size = self._rank_and_size(*self._rank_names)[1]
        return ClusterSpec({WORKER: [self._first_address(), *[""] * (size - 1)]})

    @property
    def local_process_id(self) -> int | None:
        """The rank among the processes of this machine, if the launcher sets it."""
        return self._number(self._local_rank_name) if self._local_rank_name in os.environ else None

    @abc.abstractmethod
    def _first_address(self) -> str:
        """Returns the address of rank 0; empty if it is not known."""

    def _detected_task(self) -> tuple[str | None, int | None]:
        return WORKER, self._rank_and_size(*self._rank_names)[0]

    def _default_task(self) -> tuple[str | None, int | None]:
        return WORKER, 0


class TorchrunClusterResolver(RankClusterResolver):
    """The processes that ``torchrun``, or another launcher that sets its variables, has started.

    All are workers; the index is ``RANK``. Only the address of rank 0 is known; the others are empty. If
    torchrun itself listens on ``MASTER_PORT`` (``TORCHELASTIC_USE_AGENT_STORE`` is ``True``), process 0
    listens on the next port.

    Args:
        rpc_layer: put in front of addresses.

    Raises:
        ClusterError: at a call: a variable is missing or is not a number; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj, os
        >>> launch = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
        >>> os.environ.update(launch)
        >>> resolver = dj.cluster_resolver.TorchrunClusterResolver()
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (4, 1, 'a:29500')

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    variables: ClassVar[tuple[str, ...]] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    _rank_names = ("RANK", "WORLD_SIZE")
    _local_rank_name = "LOCAL_RANK"
    _hint = "Start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself."

    def _first_address(self) -> str:
        port = self._number("MASTER_PORT")
        port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return host_port(self._variable("MASTER_ADDR"), port)


SIZE = "OMPI_COMM_WORLD_SIZE"
RANK = "OMPI_COMM_WORLD_RANK"
LAUNCHER = "OMPI_MCA_orte_hnp_uri"

# Samples of the launcher's address under Open MPI 4:
#   1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
#   1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370
_URI = re.compile(
    r"(?P<job>\d+)\.\d+;tcp(?:://(?P<v4>[^,:;\[\]]+)|6://\[(?P<v6>[^,\]]+))", re.ASCII
)
_PORTS = range(61440, 65536)


class OpenMPIClusterResolver(RankClusterResolver):
    """The processes that Open MPI's ``mpirun`` has started.

    All are workers; the index is the rank in ``MPI_COMM_WORLD``. Only the address of rank 0 is known; the
    others are empty.

    Open MPI 4 tells each process where ``mpirun`` runs. Rank 0 is assumed to run there, with a port computed
    from the id of the job, as in JAX's own detection; if it does not, pass ``coordinator_address``. Open
    MPI 5 does not: unless an address is passed, ``coordinator_address`` is None and
    ``detection_method`` is ``"mpi4py"``, by which JAX asks MPI.

    Args:
        coordinator_address: where rank 0 listens, as ``host:port``; found as described above if None.
        rpc_layer: put in front of addresses.

    Raises:
        ClusterError: at a call: a variable is missing or malformed; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj, os
        >>> launch = {
        ...     "OMPI_COMM_WORLD_SIZE": "4",
        ...     "OMPI_COMM_WORLD_RANK": "3",
        ...     "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        ... }
        >>> os.environ.update(launch)
        >>> resolver = dj.cluster_resolver.OpenMPIClusterResolver()
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (4, 3, '10.96.0.1:62624')

    Source: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    """

    variables: ClassVar[tuple[str, ...]] = (SIZE, RANK)
    _rank_names = (RANK, SIZE)
    _local_rank_name = "OMPI_COMM_WORLD_LOCAL_RANK"
    _hint = "Start the program with Open MPI's mpirun."

    def __init__(
        self, coordinator_address: str | None = None, rpc_layer: str | None = None
    ) -> None:
        self._coordinator_address = coordinator_address
        self._rpc_layer = rpc_layer

    @property
    def coordinator_address(self) -> str | None:
        """The address of rank 0; None under Open MPI 5, where only JAX with mpi4py can find it."""
        return super().coordinator_address if self._first_address() else None

    @property
    def detection_method(self) -> str | None:
        """``"mpi4py"`` if Open MPI does not say where rank 0 is, otherwise None."""
        return None if self._first_address() else "mpi4py"

    def _first_address(self) -> str:
        if self._coordinator_address is not None:
            return self._coordinator_address
        return parse_launcher(os.environ[LAUNCHER]) if LAUNCHER in os.environ else ""


def parse_launcher(uri: str) -> str:
    """Returns the first address of the launcher, with a port made from the id of the job."""
    match = _URI.match(uri)
    if match is None:
        raise ClusterError(
            f"OpenMPIClusterResolver: {LAUNCHER}={uri!r} is not of the form 'id.0;tcp://address,…:port'. "
            "Pass OpenMPIClusterResolver(coordinator_address='host:port') with the host of rank 0."
        )
    host = match["v4"] or f"[{match['v6']}]"
    # The id is a multiple of 4096, so that consecutive jobs would otherwise share one port.
    return f"{host}:{_PORTS[int(match['job']) // len(_PORTS) % len(_PORTS)]}"


class LaunchedClusterResolver(RankClusterResolver):
    """The processes that ``distribute-jax launch``, or ``dj.testing.LocalCluster``, has started.

    All are workers. The launcher picks a port for process 0 at each start of the job.

    Args:
        rpc_layer: put in front of addresses.

    Raises:
        ClusterError: at a call: a variable is missing or malformed; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj
        >>> def report():
        ...     resolver = dj.cluster_resolver.LaunchedClusterResolver()
        ...     return resolver.process_id, resolver.num_processes
        >>> dj.testing.LocalCluster(2, 1).run(report)  # doctest: +SKIP
        [..., ...]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = (NUM_PROCESSES, PROCESS_ID, ADDRESS)
    _rank_names = (PROCESS_ID, NUM_PROCESSES)
    _local_rank_name = LOCAL_PROCESS_ID
    _hint = "Start the program with distribute-jax launch."

    def _first_address(self) -> str:
        return self._variable(ADDRESS)


class SageMakerClusterResolver(ClusterResolver):
    """The hosts of the SageMaker training job that this process is part of: a worker on each.

    Args:
        port: the port of every worker.
        task_type: the job of this process.
        task_id: its index in the job.
        rpc_layer: put in front of addresses.
        environment: the value of ``environment``.

    Raises:
        ClusterError: at a call: a variable is missing; a ``RuntimeError``.
        ArgumentError: at a call: a variable is malformed; a ``ValueError``.

    Example:
        >>> import distribute_jax as dj, os
        >>> os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"] = '["algo-2", "algo-1"]', "algo-1"
        >>> resolver = dj.cluster_resolver.SageMakerClusterResolver()
        >>> resolver.cluster_spec().as_dict(), resolver.task_id
        ({'worker': ['algo-1:2223', 'algo-2:2223']}, 0)

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """

    variables: ClassVar[tuple[str, ...]] = ("SM_HOSTS", "SM_CURRENT_HOST")
    _hint = "Not running in a SageMaker training job?"

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._port = port
        self._task_type = task_type or WORKER
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment or ""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts as workers, sorted by name."""
        return ClusterSpec({WORKER: [f"{host}:{self._port}" for host in self._hosts()]})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task, of this one by default; empty for a single host."""
        return super().master(task_type, task_id, rpc_layer) if len(self._hosts()) > 1 else ""

    def _detected_task(self) -> tuple[str | None, int | None]:
        hosts, host = self._hosts(), self._variable("SM_CURRENT_HOST")
        with converting("SM_CURRENT_HOST", host, f"one of the hosts in SM_HOSTS, {hosts}"):
            return WORKER, hosts.index(host)

    def _hosts(self) -> list[str]:
        text = self._variable("SM_HOSTS")
        with converting("SM_HOSTS", text, 'a JSON list of hosts, such as ["algo-1", "algo-2"]'):
            return sorted(json.loads(text))
