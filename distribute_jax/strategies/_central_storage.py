"""Parameters in one place, computation on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from distribute_jax._mesh import DATA, replica_mesh
from distribute_jax.program import ParameterDevice
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import (
    check_memory_kind,
    check_replicas_per_device,
    find_device,
    find_devices,
    local_devices,
)


class CentralStorageStrategy(Strategy):
    """Keeps parameters and optimizer state on one device and computes on all.

    Each ``run`` sends the state that the step reads to the compute devices, updates it there once,
    and brings one copy back; between steps no compute device holds any. The numbers are those of
    ``MirroredStrategy``. Results that are equal on all replicas are stored on the parameter device too,
    so a pytree of parameters that is passed in and returned is stored centrally as well.

    Args:
        compute_devices: each a ``jax.Device``, an index or a string such as ``"gpu:0"``; None or an empty
            list means all local devices of the default backend.
        parameter_device: where state is stored, named likewise; it need not be a compute device. None
            means the compute device where there is only one, else the host's ``"cpu:0"``.
        memory_kind: which memory of the parameter device holds the variables between steps, such as
            ``"pinned_host"``; None means its default memory, where arrays of fewer than 1024 elements stay in
            any case. Outside of ``run`` JAX computes with that only: read others with ``np.asarray``.
        replicas_per_device: how many replicas each compute device runs, one after the other, as in
            ``MirroredStrategy``.
        steps_in_flight: as in ``MirroredStrategy``.
        axis_name: as in ``MirroredStrategy``.

    Raises:
        ValueError: a device is unknown, named twice, or of another process; or the parameter device
            has no memory of that kind.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:2")
        >>> strategy.num_replicas_in_sync, strategy.parameter_device.id
        (2, 2)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CentralStorageStrategy
    """

    def __init__(
        self,
        compute_devices: Sequence[Any] | None = None,
        parameter_device: Any = None,
        *,
        memory_kind: str | None = None,
        replicas_per_device: int = 1,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        devices = find_devices(compute_devices)
        each = check_replicas_per_device("CentralStorageStrategy", replicas_per_device)
        if parameter_device is not None:
            device = find_device(parameter_device)
        else:
            device = devices[0] if len(devices) == 1 else (local_devices("cpu") or devices)[0]
        check_memory_kind("CentralStorageStrategy: memory_kind", memory_kind, device)
        super().__init__(
            replica_mesh(devices, each),
            steps_in_flight=steps_in_flight,
            parameter_device=ParameterDevice(device, memory_kind),
            axis_name=axis_name,
        )
        self._device = device

    @property
    def parameter_device(self) -> jax.Device:
        """Where parameters and optimizer state are stored between steps."""
        return self._device

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.parameter_device})"
