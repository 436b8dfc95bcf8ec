"""The processes that torchrun, or a launcher with its variables, has started."""

from __future__ import annotations

import os
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._base import RankClusterResolver


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
        >>> for name in launch:
        ...     del os.environ[name]

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    variables: ClassVar[tuple[str, ...]] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    _rank_names = ("RANK", "WORLD_SIZE")
    _local_rank_name = "LOCAL_RANK"
    _hint = "Start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself."

    def __init__(self, rpc_layer: str | None = None) -> None:
        self._rpc_layer = rpc_layer

    def _first_address(self) -> str:
        host, port = self._variable("MASTER_ADDR"), self._number("MASTER_PORT")
        if not host or not 0 < port < 65535:
            raise ClusterError(
                f"TorchrunClusterResolver: MASTER_ADDR={host!r} and MASTER_PORT={port} must be the host "
                "of rank 0 and a port from 1 to 65534."
            )
        return f"{host}:{port + (os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True')}"
