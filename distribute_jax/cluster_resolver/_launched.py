"""The processes that ``distribute-jax launch``, or ``dj.testing.LocalCluster``, has started."""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax._supervision import (
    ATTEMPT,
    HOST,
    LOCAL_PROCESS_ID,
    MEETING,
    NUM_PROCESSES,
    PROCESS_ID,
)
from distribute_jax.cluster_resolver._base import RankClusterResolver, with_port

_POLL = 0.02


class LaunchedClusterResolver(RankClusterResolver):
    """The processes that ``distribute-jax launch``, or ``dj.testing.LocalCluster``, has started.

    All are workers. At each start of the job process 0 picks a free port and writes it into a folder of the
    job. The others wait for it in ``coordinator_address``, ``cluster_spec`` and ``master``.

    Args:
        rpc_layer: put in front of addresses.
        timeout: how many seconds to wait for process 0.

    Raises:
        ClusterError: at a call: a variable is missing or malformed, or process 0 did not write its
            address in time; a ``RuntimeError``.

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
    _rank_names = (PROCESS_ID, NUM_PROCESSES)
    _local_rank_name = LOCAL_PROCESS_ID
    _hint = "Start the program with distribute-jax launch."

    def __init__(self, rpc_layer: str | None = None, timeout: float = 60.0) -> None:
        self._rpc_layer = rpc_layer
        self._timeout = timeout

    @property
    def num_processes(self) -> int:
        """How many processes train together; does not wait for process 0."""
        return self._rank_and_size(PROCESS_ID, NUM_PROCESSES)[1]

    @property
    def process_id(self) -> int:
        """Which of the processes this one is; does not wait for process 0."""
        return self._rank_and_size(PROCESS_ID, NUM_PROCESSES)[0]

    def _first_address(self) -> str:
        file = Path(self._variable(MEETING)) / f"coordinator-{self._number(ATTEMPT)}"
        if self.process_id == 0:
            return _publish_address(file, self._variable(HOST))
        return with_port(
            self._wait_for(file), f"LaunchedClusterResolver: process 0 wrote to {file}"
        )

    def _wait_for(self, file: Path) -> str:
        limit = time.monotonic() + self._timeout
        while not file.exists():
            if time.monotonic() > limit:
                raise ClusterError(
                    f"LaunchedClusterResolver: process {self.process_id} waited {self._timeout:g} s for the "
                    f"address of process 0, and {file} is missing. Process 0 has ended, or has not yet asked "
                    "for the coordinator: make the strategy in every process, and as the first thing."
                )
            time.sleep(_POLL)
        return file.read_text()


@functools.cache
def _publish_address(file: Path, host: str) -> str:
    """Picks the port on which process 0 listens, once per process, and writes it for the others."""
    address = _free_address(host)
    part = file.with_name(f".{file.name}-{os.getpid()}")
    part.write_text(address)
    part.replace(file)  # nobody sees it half written
    return address


def _free_address(host: str) -> str:
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
            f"LaunchedClusterResolver: process 0 cannot listen on {host!r} ({HOST}): {error}. It must be "
            "an address of this machine."
        ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
