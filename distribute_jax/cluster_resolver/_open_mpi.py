"""The processes that Open MPI's mpirun has started."""

from __future__ import annotations

import os
import re
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._base import RankClusterResolver

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
    MPI 5 does not tell: unless an address is passed, ``coordinator_address`` is None and
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
        >>> for name in launch:
        ...     del os.environ[name]

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
        """``"mpi4py"`` if Open MPI does not tell where rank 0 is, otherwise None."""
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
