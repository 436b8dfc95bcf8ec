"""Synchronous data parallelism over the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA, replica_mesh
from distribute_jax.collectives import CrossDeviceOps, ReductionToOneDevice
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import (
    check_replicas_per_device,
    find_device,
    find_devices,
    log_cluster_ignored,
)


class MirroredStrategy(Strategy):
    """Trains on several devices of this process; every device holds the whole model.

    Each device is a replica, handles its share of each batch, and applies the same update, so the
    copies stay equal. TF_CONFIG is ignored, as in TensorFlow; in one of several processes it uses
    that process's devices only.

    Args:
        devices: each a ``jax.Device``, an index or a string such as ``"gpu:0"``; None or an empty list means
            all local devices of the default backend.
        cross_device_ops: how ``ReplicaContext.all_reduce`` combines the replicas: one of
            ``NcclAllReduce``, ``HierarchicalCopyAllReduce``, ``ReductionToOneDevice``,
            ``RingAllReduce`` or your own; None means XLA's own collectives, as ``NcclAllReduce``.
        shard_optimizer_state: True for a sharded update: gradients are reduce-scattered, each replica
            updates its share of the weights and keeps only its share of the optimizer's state, and the
            new weights are gathered. Steps, numbers and checkpoints are the same.
        replicas_per_device: how many replicas each device has, one after the other, each with its share of
            the batch, its random numbers and its batch norm. ``k`` on each of ``n`` devices are the replicas
            of ``k * n`` devices, with the activations of one at a time in memory; their gradients are added
            up on the device first, so that sums equal those of ``k * n`` devices to rounding.
        optimizer_memory_kind: the memory that holds the state of optimizers between steps, such as
            ``"pinned_host"`` for that of the host; each step moves it to the device and back. None means the
            devices' default memory, where arrays of fewer than 1024 elements stay in any case.
        steps_in_flight: how many dispatched steps may be unfinished; None for no limit, except on
            several CPU devices, where it is at most 2.
        axis_name: how code in ``run`` names the axis of the replicas, as in
            ``nnx.BatchNorm(axis_name="batch")`` or ``jax.lax.pmean(x, "batch")``; ``"data"`` always works.

    Raises:
        ValueError: a device is unknown, named twice, or of another process; ``cross_device_ops`` is not
            one, or reduces to another device; ``shard_optimizer_state`` is not a bool.

    Example:
        >>> import distribute_jax as dj
        >>> dj.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy; the sharded update:
    Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020,
    https://arxiv.org/abs/2004.13336
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_optimizer_state: bool = False,
        replicas_per_device: int = 1,
        optimizer_memory_kind: str | None = None,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        name = type(self).__name__
        replicas = find_devices(devices)
        log_cluster_ignored(name)
        each = check_replicas_per_device(name, replicas_per_device, cross_device_ops)
        self._cross_device_ops = _placed(cross_device_ops, replicas)
        super().__init__(
            replica_mesh(replicas, each),
            steps_in_flight=steps_in_flight,
            shared=(nnx.OptState,) if shard_optimizer_state else (),
            optimizer_memory_kind=optimizer_memory_kind,
            axis_name=axis_name,
        )


def _placed(ops: CrossDeviceOps | None, devices: Sequence[jax.Device]) -> CrossDeviceOps | None:
    """Returns the operation, with the device that it names resolved to a replica."""
    if not isinstance(ops, ReductionToOneDevice) or ops.reduce_to_device is None:
        return ops
    device = find_device(ops.reduce_to_device)
    if device not in devices:
        raise ArgumentError(
            f"MirroredStrategy(cross_device_ops={ops!r}): {device} is not one of the strategy's devices "
            f"{list(map(str, devices))}."
        )
    return ops.on_replica(list(devices).index(device))
