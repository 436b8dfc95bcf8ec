"""Synchronous data parallelism for models that do not fit on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from distribute_jax._checks import check_int
from distribute_jax._mesh import DATA, replica_mesh, state_mesh
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.processes import ClusterOptions
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import check_replicas_per_device, devices_of_job


class FullyShardedStrategy(Strategy):
    """Trains on several devices, each of which stores a share of the model.

    Parameters, gradients and the optimizer's state are divided among the devices, each array along one
    dim, so that N devices hold a model of about N times the size. The step does not change: a parameter is
    gathered where the step reads it, one layer at a time inside ``nnx.scan``; gradients are
    reduce-scattered; each replica updates its share. Losses and updates are those of
    ``MirroredStrategy``: the same bits for SGD with momentum where XLA compiles the computation of a
    replica in the same way, else equal to rounding. Arrays of fewer than 1024 elements, or without a dim
    that is a multiple of N, are whole on each device; :meth:`placement` lists them.

    Args:
        devices: as for ``MirroredStrategy``; None or an empty list means all local devices.
        shard_over: how many consecutive devices divide the model; each such group has all of it, and the
            number of devices is a multiple of it. None means all devices. The step, its replicas and the axis
            ``"data"`` stay those of all devices. Sums in groups have another order, so losses and updates are
            those of ``MirroredStrategy`` to rounding. 1, which divides nothing, is refused.
        reshard_after_forward: whether a gathered parameter is dropped after its use and gathered again for
            the backward pass, as in PyTorch's ``fully_shard``. None: only inside ``nnx.scan`` and
            rematerialised blocks, where one layer is whole at a time. True: everywhere, which takes the
            least memory. False: nowhere; each parameter is gathered once in a step, and is whole until its
            gradient is computed.
        replicas_per_device: as for ``MirroredStrategy``; the state is divided among the devices.
        cluster_resolver: describes the processes, to divide the model over the devices of all of them, as
            ``dj.cluster_resolver.detect()``; they are connected as by ``MultiWorkerMirroredStrategy``.
            None means the devices of this process.
        cluster_options: how long the processes wait for each other.
        optimizer_memory_kind: as in ``MirroredStrategy``.
        steps_in_flight: as in ``MirroredStrategy``.
        axis_name: as in ``MirroredStrategy``.

    Raises:
        ValueError: an argument is invalid; at the first ``run``: no parameter can be divided.
        RuntimeError: as ``MultiWorkerMirroredStrategy``, with ``cluster_resolver``.

    Example:
        >>> import distribute_jax as dj
        >>> from flax import nnx
        >>> strategy = dj.FullyShardedStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
        >>> for row in strategy.placement(model):
        ...     print(row.path, row.shape, tuple(row.spec), row.why)
        kernel (64, 32) (None, 'data') dim 1 is divided among 2 replicas

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
    Parallel", 2023, https://arxiv.org/abs/2304.11277
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        shard_over: int | None = None,
        reshard_after_forward: bool | None = None,
        replicas_per_device: int = 1,
        cluster_resolver: ClusterResolver | None = None,
        cluster_options: ClusterOptions | None = None,
        optimizer_memory_kind: str | None = None,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        name = type(self).__name__
        each = check_replicas_per_device(name, replicas_per_device)
        self._resolver = cluster_resolver
        used = devices_of_job(devices, cluster_resolver, cluster_options, name)
        mesh = replica_mesh(used, each)
        if shard_over is not None:
            shard_over = check_int(f"{name}: shard_over", shard_over)
            state_mesh(mesh, shard_over)  # refuses what does not fit the devices
        super().__init__(
            mesh,
            steps_in_flight=steps_in_flight,
            shared=(nnx.Variable,),
            shard_over=shard_over,
            reshard_after_forward=reshard_after_forward,
            optimizer_memory_kind=optimizer_memory_kind,
            axis_name=axis_name,
        )
