"""Synchronous data parallelism over the devices of all processes of a job."""

from __future__ import annotations

from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA, replica_mesh
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.collectives import (
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    RingAllReduce,
)
from distribute_jax.processes import ClusterOptions
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import check_replicas_per_device, connect


class MultiWorkerMirroredStrategy(Strategy):
    """Trains on all devices of several processes; every device holds the whole model.

    The same program is started once for each process. Making the strategy connects them through
    ``jax.distributed``, so make it before anything else that computes. Each device of each process is a
    replica; replicas are numbered process by process. Each process reads and sees its own share of the
    data and its own replicas' results; what is reduced, gathered or mirrored is the same everywhere. If
    no cluster is detected, this process is the only worker.

    Args:
        cluster_resolver: describes the processes; ``dj.cluster_resolver.detect()`` if None.
        communication_options: how ``ReplicaContext.all_reduce`` combines the replicas: the algorithm,
            packing, and ``timeout_seconds``, after which a collective that another process does not join
            fails; ``cluster_options.step_seconds`` if None.
        cross_device_ops: what ``"AUTO"`` means: an operation as ``MirroredStrategy`` takes them. For many
            hosts ``HierarchicalCopyAllReduce()`` adds up inside each process first, then between them.
            None means XLA's own collectives.
        cluster_options: how long the processes wait for each other.
        shard_optimizer_state: True for a sharded update, as in ``MirroredStrategy``: each replica keeps
            its share of the optimizer's state.
        replicas_per_device: how many replicas each device has, one after the other, as in
            ``MirroredStrategy``.
        optimizer_memory_kind: as in ``MirroredStrategy``.
        steps_in_flight: as in ``MirroredStrategy``.
        axis_name: as in ``MirroredStrategy``.

    Raises:
        ValueError: an argument is invalid.
        BackendStartedError: JAX has already started its devices; a ``RuntimeError``.
        ClusterError: the cluster is described wrongly, or the processes cannot connect; a ``RuntimeError``.
        ProcessesDifferError: the processes differ in what has to be the same; a ``RuntimeError``.
        DeadlineExceededError: a process did not connect in time; a ``TimeoutError``.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.MultiWorkerMirroredStrategy()
        >>> strategy.num_replicas_in_sync == len(strategy.mesh.devices.flat)
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        cluster_options: ClusterOptions | None = None,
        shard_optimizer_state: bool = False,
        replicas_per_device: int = 1,
        optimizer_memory_kind: str | None = None,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        name = type(self).__name__
        self._communication_options = communication_options or CommunicationOptions()
        self._cross_device_ops = cross_device_ops
        if getattr(cross_device_ops, "reduce_to_device", None) is not None:
            raise ArgumentError(
                f"{name}(cross_device_ops={cross_device_ops!r}): a name such as 'gpu:0' means another device "
                "in each process. Leave reduce_to_device out: the values are added up on replica 0."
            )
        is_ring = self._communication_options.implementation is CommunicationImplementation.RING
        ops = RingAllReduce() if is_ring else cross_device_ops
        each = check_replicas_per_device(name, replicas_per_device, ops)
        self._resolver, devices = connect(
            cluster_resolver, cluster_options, name, self._communication_options.timeout_seconds
        )
        super().__init__(
            replica_mesh(devices, each),
            steps_in_flight=steps_in_flight,
            shared=(nnx.OptState,) if shard_optimizer_state else (),
            optimizer_memory_kind=optimizer_memory_kind,
            axis_name=axis_name,
        )
