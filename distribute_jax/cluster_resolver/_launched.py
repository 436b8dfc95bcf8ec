"""The processes that ``distribute-jax launch``, or ``dj.testing.LocalCluster``, has started."""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._base import (
    WORKER,
    ClusterResolver,
    Ranks,
    check_rank,
    number_of,
    value_of,
    with_port,
)
from distribute_jax.cluster_resolver._spec import ClusterSpec

NUM_PROCESSES = "DISTRIBUTE_JAX_NUM_PROCESSES"
PROCESS_ID = "DISTRIBUTE_JAX_PROCESS_ID"
LOCAL_PROCESS_ID = "DISTRIBUTE_JAX_LOCAL_PROCESS_ID"
JOB = "DISTRIBUTE_JAX_JOB"
"""A number in hex that no other job has."""
ATTEMPT = "DISTRIBUTE_JAX_ATTEMPT"
"""How often the job was started before: 0, 1, …"""
HOST = "DISTRIBUTE_JAX_HOST"
"""The address that process 0 listens on: 127.0.0.1 where all processes are on one machine."""
MEETING = "DISTRIBUTE_JAX_MEETING"
"""A folder of this job on this machine, which nobody else can read."""
STATUS = "DISTRIBUTE_JAX_STATUS"
"""The status file of this process, in the folder."""

VARIABLES = (NUM_PROCESSES, PROCESS_ID, LOCAL_PROCESS_ID, JOB, ATTEMPT, HOST, MEETING, STATUS)

_NAME = "LaunchedClusterResolver"
_HINT = "Start the program with distribute-jax launch."
_POLL = 0.02


class LaunchedClusterResolver(ClusterResolver):
    """The processes that ``distribute-jax launch``, or ``dj.testing.LocalCluster``, has started.

    All are workers. Process 0 picks a port that nobody listens on, once for each start of the job, and
    tells the others through a folder that only this job knows; they wait for it, so that
    ``coordinator_address``, ``cluster_spec`` and ``master`` may take as long as process 0 takes to ask.

    Args:
        rpc_layer: put in front of addresses.
        timeout: how many seconds to wait for process 0.

    Raises:
        ClusterError: at a call: a variable is missing or malformed, or process 0 did not say in time
            where it is; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj
        >>> def report():
        ...     resolver = dj.cluster_resolver.LaunchedClusterResolver()
        ...     return resolver.process_id, resolver.num_processes
        >>> dj.testing.LocalCluster(2, 1).run(report)  # doctest: +SKIP
        [..., ...]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = (NUM_PROCESSES, PROCESS_ID, HOST, MEETING, ATTEMPT)

    def __init__(self, rpc_layer: str | None = None, timeout: float = 60.0) -> None:
        self._rpc_layer = rpc_layer
        self._timeout = timeout

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``: workers, whose addresses but the first are empty."""
        return self._ranks().spec()

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: of process 0 where no task is named."""
        return self._ranks().master(task_type, task_id, rpc_layer or self._rpc_layer)

    @property
    def num_processes(self) -> int:
        """See ``ClusterResolver``; waits for nobody."""
        return _own()[1]

    @property
    def process_id(self) -> int:
        """See ``ClusterResolver``; waits for nobody."""
        return _own()[0]

    @property
    def local_process_id(self) -> int | None:
        """See ``ClusterResolver``: the number among the processes that one supervisor started."""
        return number_of(LOCAL_PROCESS_ID, _NAME, _HINT) if LOCAL_PROCESS_ID in os.environ else None

    def _found_task_type(self) -> str | None:
        return WORKER

    def _found_task_id(self) -> int | None:
        return _own()[0]

    def _ranks(self) -> Ranks:
        process, processes = _own()
        meeting = Path(value_of(MEETING, _NAME, _HINT))
        attempt = number_of(ATTEMPT, _NAME, _HINT)
        host = value_of(HOST, _NAME, _HINT)
        return Ranks(
            process, processes, _meeting_point(process, meeting, attempt, host, self._timeout)
        )


def coordinator_file(meeting: Path, attempt: int) -> Path:
    """Gives the file in which process 0 says where it listens."""
    return meeting / f"coordinator-{attempt}"


def write_whole(path: Path, text: str) -> None:
    """Writes a file that nobody sees half written."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _own() -> tuple[int, int]:
    process, processes = (number_of(name, _NAME, _HINT) for name in (PROCESS_ID, NUM_PROCESSES))
    check_rank(process, processes, (PROCESS_ID, NUM_PROCESSES), _NAME)
    return process, processes


def _meeting_point(process: int, meeting: Path, attempt: int, host: str, timeout: float) -> str:
    file = coordinator_file(meeting, attempt)
    if process == 0:
        return _chosen(file, host)
    return with_port(_awaited(file, process, timeout), f"{_NAME}: process 0 wrote to {file}")


@functools.cache
def _chosen(file: Path, host: str) -> str:
    """Picks where process 0 listens, once in this process, and tells the others."""
    address = _free_address(host)
    write_whole(file, address)
    return address


def _free_address(host: str) -> str:
    """Picks a port that nobody listens on, not even one who would share it."""
    try:
        family, kind, protocol, _, (address, *_) = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        )[0]
        # Without SO_REUSEPORT the bind fails where another job listens; gRPC's own would not.
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
    except OSError as error:
        raise ClusterError(
            f"{_NAME}: process 0 cannot listen on {host!r} ({HOST}): {error}. It must be an address of "
            "this machine."
        ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _awaited(file: Path, process: int, timeout: float) -> str:
    limit = time.monotonic() + timeout
    while not file.exists():
        if time.monotonic() > limit:
            raise ClusterError(
                f"{_NAME}: process {process} waited {timeout:g} s for process 0 to say where it listens, "
                f"and {file} is missing. Process 0 has ended, or has not yet asked for the coordinator: "
                "make the strategy in every process, and as the first thing."
            )
        time.sleep(_POLL)
    return file.read_text()
