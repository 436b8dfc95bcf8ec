"""Synchronous data parallelism over the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import replica_mesh
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import find_devices


class MirroredStrategy(Strategy):
    """Trains on several devices of this process; every device holds the whole model.

    Each device is a replica, handles its share of each batch, and applies the same update, so the
    copies stay equal. TF_CONFIG is ignored, as in TensorFlow.

    Args:
        devices: ``jax.Device``s, indices, or strings such as ``"gpu:0"``; None or an empty list means
            all local devices of the default backend.
        cross_device_ops: how replicas are combined; None means XLA's own collectives.
        steps_in_flight: how many dispatched steps may be unfinished; None for no limit, except on
            CPU, where it is 2.

    Raises:
        ValueError: a device is unknown, named twice, or of another process.

    Example:
        >>> import distribute_jax as dj
        >>> dj.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """

    __module__ = "distribute_jax"

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        cross_device_ops: None = None,
        *,
        steps_in_flight: int | None = None,
    ) -> None:
        if cross_device_ops is not None:
            raise ArgumentError(
                f"MirroredStrategy(cross_device_ops={cross_device_ops!r}): only None is known, which "
                "uses XLA's own collectives. Leave the argument out."
            )
        super().__init__(replica_mesh(find_devices(devices)), steps_in_flight=steps_in_flight)
