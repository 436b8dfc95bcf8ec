"""Synchronous data parallelism for models that do not fit one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from distribute_jax._mesh import DATA, replica_mesh
from distribute_jax._messages import check_int
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import find_devices, note_cluster_ignored


class FullyShardedStrategy(Strategy):
    """Trains on several devices of this process; every device keeps its share of the model.

    Example:
        >>> import distribute_jax as dj
        >>> dj.FullyShardedStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        replicas_per_device: int = 1,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        name = type(self).__name__
        each = check_int(f"{name}: replicas_per_device", replicas_per_device)
        note_cluster_ignored(name)
        super().__init__(
            replica_mesh(find_devices(devices), each),
            steps_in_flight=steps_in_flight,
            shared=(nnx.Variable,),
            axis_name=axis_name,
        )
