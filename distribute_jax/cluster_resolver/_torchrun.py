"""The processes that torchrun, or a launcher with its variables, has started."""

from __future__ import annotations

import os
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._base import (
    WORKER,
    ClusterResolver,
    Ranks,
    check_rank,
    number_of,
    value_of,
)
from distribute_jax.cluster_resolver._spec import ClusterSpec

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_NAME = "TorchrunClusterResolver"
_HINT = "Start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself."


class TorchrunClusterResolver(ClusterResolver):
    """The processes that ``torchrun``, or another launcher that sets its variables, has started.

    All are workers, and ``RANK`` is the index. Only the address of rank 0 is known; those of the others
    are empty. While torchrun itself listens at ``MASTER_PORT`` (it says so in
    ``TORCHELASTIC_USE_AGENT_STORE``), process 0 is met at the port above.

    Args:
        rpc_layer: put in front of addresses.

    Raises:
        ClusterError: at a call: a variable is missing or no number; a ``RuntimeError``.

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

    variables: ClassVar[tuple[str, ...]] = (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

    def __init__(self, rpc_layer: str | None = None) -> None:
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``: workers, whose addresses but the first are empty."""
        return _ranks().spec()

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: of rank 0 where no task is named."""
        return _ranks().master(task_type, task_id, rpc_layer or self._rpc_layer)

    def _found_task_type(self) -> str | None:
        return WORKER

    def _found_task_id(self) -> int | None:
        return _ranks().rank

    @property
    def local_process_id(self) -> int | None:
        """See ``ClusterResolver``: LOCAL_RANK, if it is set."""
        return number_of(LOCAL_RANK, _NAME, _HINT) if LOCAL_RANK in os.environ else None


def _ranks() -> Ranks:
    rank, size = (number_of(name, _NAME, _HINT) for name in (RANK, WORLD_SIZE))
    check_rank(rank, size, (RANK, WORLD_SIZE), _NAME)
    host = value_of(MASTER_ADDR, _NAME, _HINT)
    port = number_of(MASTER_PORT, _NAME, _HINT)
    if not host or not 0 < port < 65535:
        raise ClusterError(
            f"{_NAME}: {MASTER_ADDR}={host!r} and {MASTER_PORT}={port} must be the host of rank 0 and "
            "a port from 1 to 65534."
        )
    return Ranks(rank, size, f"{host}:{port + (os.environ.get(AGENT_STORE) == 'True')}")
