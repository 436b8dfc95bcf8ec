"""Everything on one device."""

from __future__ import annotations

from typing import Any

from distribute_jax._mesh import DATA, replica_mesh
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import (
    check_replicas_per_device,
    find_device,
    log_cluster_ignored,
)


class OneDeviceStrategy(Strategy):
    """Runs everything on a named device, through the same code as the other strategies.

    It is the reference that the others equal, and a stand-in to try code that will be distributed.

    Args:
        device: a ``jax.Device``, an index into the local devices, or a string such as ``"gpu:0"``.
        replicas_per_device: how many replicas it has, one after the other, as in ``MirroredStrategy``.
        optimizer_memory_kind: as in ``MirroredStrategy``.
        axis_name: as in ``MirroredStrategy``.

    Raises:
        ValueError: there is no such device; the message lists those there are.

    Example:
        >>> import distribute_jax as dj
        >>> dj.OneDeviceStrategy("cpu:0").num_replicas_in_sync
        1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """

    _offers_per_replica_input = False

    def __init__(
        self,
        device: Any,
        *,
        replicas_per_device: int = 1,
        optimizer_memory_kind: str | None = None,
        axis_name: str = DATA,
    ) -> None:
        each = check_replicas_per_device("OneDeviceStrategy", replicas_per_device)
        mesh = replica_mesh([find_device(device)], each)
        log_cluster_ignored(type(self).__name__)
        super().__init__(
            mesh,
            steps_in_flight=None,
            optimizer_memory_kind=optimizer_memory_kind,
            axis_name=axis_name,
        )
