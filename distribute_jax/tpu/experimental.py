"""The names of ``tf.tpu.experimental``: a TPU's topology, and the assignment of its cores to replicas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distribute_jax import processes
from distribute_jax._checks import check_int, converting, refuse
from distribute_jax._errors import ArgumentError
from distribute_jax._lazy import publish
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.processes import ClusterOptions

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system"]

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Topology:
    """The cores of all processes, by their coordinates (x, y, z, core on the chip).

    ``initialize_tpu_system`` returns one. Several slices are placed one after the other along x. Devices
    without coordinates, such as simulated ones, get those of TPU v3 hosts: two chips wide, two cores on each
    chip, one host after the other along y.

    Args:
        devices: the devices of all processes, as in ``jax.devices()``; the same number for each process.

    Attributes:
        mesh_shape: the number of cores along each axis, int32 of shape (4,).
        mesh_rank: the number of axes: 4.
        device_coordinates: the coordinates of the devices, int32 of shape (processes, devices of each, 4).
        missing_devices: the coordinates within ``mesh_shape`` without a device, of shape (missing, 4).
        num_tasks: the number of processes.
        num_tpus_per_task: the number of devices of each process.

    Raises:
        ValueError: there are no devices, or the processes have different numbers of them; at a call: no
            device has these coordinates.

    Example:
        >>> import distribute_jax as dj, jax
        >>> topology = dj.tpu.experimental.Topology(jax.devices()[:8])
        >>> topology.mesh_shape.tolist(), topology.num_tasks, topology.num_tpus_per_task
        ([2, 2, 1, 2], 1, 8)

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/Topology
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        with converting("Topology: devices", devices, "a list of devices, as jax.devices()"):
            by_process = sorted(devices, key=lambda device: (device.process_index, device.id))
        counts = set(Counter(device.process_index for device in by_process).values())
        if len(counts) != 1:
            raise ArgumentError(
                "Every process must have the same number of devices, one at least; the numbers are "
                f"{sorted(counts)}. Pass jax.devices()."
            )
        self._devices, self.num_tpus_per_task = by_process, counts.pop()
        at = np.asarray(_coordinates(by_process, self.num_tpus_per_task), np.int32)
        at -= at.min(0)
        self.mesh_shape: Ints = at.max(0) + 1
        self.mesh_rank = len(self.mesh_shape)
        self.device_coordinates: Ints = at.reshape(-1, self.num_tpus_per_task, self.mesh_rank)
        self.num_tasks = len(self.device_coordinates)
        self._numbers: Ints = np.full(self.mesh_shape, -1, np.int32)
        self._numbers[tuple(at.T)] = np.arange(len(at))
        self.missing_devices: Ints = np.argwhere(self._numbers < 0).astype(np.int32)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the process that has the device at these coordinates."""
        return self._number_at(device_coordinates) // self.num_tpus_per_task

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the device at these coordinates among those of its process."""
        return self._number_at(device_coordinates) % self.num_tpus_per_task

    def device_at_coordinates(self, device_coordinates: Sequence[int]) -> jax.Device:
        """Returns the device at these coordinates."""
        return self._devices[self._number_at(device_coordinates)]

    def _number_at(self, coordinates: Sequence[int] | Ints) -> int:
        with converting("device_coordinates", coordinates, "four ints, (x, y, z, core)"):
            at = tuple(map(int, coordinates))
        inside = len(at) == self.mesh_rank and all(
            0 <= i < n for i, n in zip(at, self.mesh_shape, strict=True)
        )
        number = int(self._numbers[at]) if inside else -1
        if number < 0:
            raise ArgumentError(
                f"There is no device at the coordinates {at} of {self!r}. Coordinates are four ints, "
                "(x, y, z, core), each below that of topology.mesh_shape."
            )
        return number

    def __repr__(self) -> str:
        return (
            f"Topology(mesh_shape={self.mesh_shape.tolist()}, num_tasks={self.num_tasks}, "
            f"num_tpus_per_task={self.num_tpus_per_task})"
        )


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    cluster_options: ClusterOptions | None = None,
) -> Topology:
    """Returns the topology of the cores of all processes, after connecting the processes.

    JAX starts a TPU by itself, so nothing else is initialized, and a second call loses nothing.

    Args:
        cluster_resolver: a resolver; ``dj.cluster_resolver.detect()`` if None.
        cluster_options: the timeouts of the job.

    Returns:
        The topology, from which ``DeviceAssignment.build`` makes replicas of several cores.

    Raises:
        ValueError: ``cluster_resolver`` is not a resolver.
        RuntimeError: as for ``experimental_connect_to_cluster``.
        TimeoutError: a process did not connect in time.

    Example:
        >>> import distribute_jax as dj, jax
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> topology = dj.initialize_tpu_system(resolver)
        >>> topology.num_tasks * topology.num_tpus_per_task == len(jax.devices())
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/initialize_tpu_system
    """
    processes.connect(cluster_resolver, cluster_options, "initialize_tpu_system")
    return Topology(jax.devices())


def _coordinates(devices: Sequence[Any], per_task: int) -> list[tuple[int, ...]]:
    if not all(hasattr(device, "coords") for device in devices):
        return [_simulated(number, per_task) for number in range(len(devices))]
    width = 1 + max(device.coords[0] for device in devices)
    slices = [getattr(device, "slice_index", 0) or 0 for device in devices]
    return [
        (device.coords[0] + width * number, *device.coords[1:], device.core_on_chip)
        for device, number in zip(devices, slices, strict=True)
    ]


def _simulated(number: int, per_task: int) -> tuple[int, ...]:
    """Returns the coordinates that a device would have on a TPU v3 host; an odd number is one column."""
    task, place = divmod(number, per_task)
    cores = 2 if per_task % 2 == 0 else 1
    chip, core = divmod(place, cores)
    chips = per_task // cores
    wide = 2 if chips % 2 == 0 else 1
    return chip % wide, task * (chips // wide) + chip // wide, 0, core


class DeviceAssignment:
    """The cores of each replica, by their coordinates.

    ``build``, which divides the topology into blocks, is simpler than the constructor.

    Args:
        topology: the result of ``initialize_tpu_system``.
        core_assignment: ints of shape (replicas, cores per replica, 4): the coordinates of every core.

    Attributes:
        topology: the topology that the cores belong to.
        num_replicas: the number of replicas.
        num_cores_per_replica: the number of cores of each replica.
        core_assignment: the coordinates of every core, int32 of shape (replicas, cores per replica, 4).
        devices: the devices of each replica, in order: a list of lists.

    Raises:
        ValueError: ``topology`` is not a ``Topology``; the array has another shape, or names a core twice or
            one that does not exist.

    Example:
        >>> import distribute_jax as dj, jax
        >>> topology = dj.tpu.experimental.Topology(jax.devices()[:8])
        >>> assignment = dj.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
        >>> assignment.num_replicas, assignment.num_cores_per_replica, assignment.coordinates(1, 0)
        (4, 2, (0, 1, 0, 0))

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceAssignment
    """

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        self.topology = topology
        with converting("core_assignment", core_assignment, "a pytree of ints"):
            cores = np.asarray(core_assignment, np.int32)
        if cores.ndim != 3 or cores.shape[-1] != topology.mesh_rank or not cores.size:
            raise ArgumentError(
                f"core_assignment must have shape (replicas, cores of each, {topology.mesh_rank}); got "
                f"{cores.shape}."
            )
        each = [tuple(core) for core in cores.reshape(-1, cores.shape[-1]).tolist()]
        twice = sorted({core for core in each if each.count(core) > 1})
        if twice:
            raise ArgumentError(
                f"core_assignment must name every core once; the cores {twice[:4]} are named more than once."
            )
        self.core_assignment: Ints = cores
        self.num_replicas, self.num_cores_per_replica = cores.shape[:2]
        self.devices = [
            [topology.device_at_coordinates(core) for core in replica] for replica in cores
        ]

    @staticmethod
    def build(
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Divides the topology into blocks of neighbouring cores, one for each replica.

        Replicas are numbered process by process.

        Args:
            topology: the result of ``initialize_tpu_system``.
            computation_shape: the number of cores of a replica along each axis (x, y, z, core);
                ``[1, 1, 1, 2]`` is the two cores of a chip. One core if None.
            computation_stride: the distance between the cores of a replica along each axis; 1 if None.
            num_replicas: the number of replicas; the first blocks are used.

        Raises:
            ValueError: a shape is not four positive ints, or that many replicas do not fit.

        Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceAssignment#build
        """
        shape = _checked_shape(topology, "computation_shape", computation_shape)
        stride = _checked_shape(topology, "computation_stride", computation_stride)
        blocks = list(_blocks(topology, shape, stride))
        if isinstance(num_replicas, bool) or not 1 <= num_replicas <= len(blocks):
            raise ArgumentError(
                f"{len(blocks)} replicas of computation_shape={shape.tolist()} and "
                f"computation_stride={stride.tolist()} fit in {topology!r}; got {num_replicas=!r}."
            )
        return DeviceAssignment(topology, blocks[:num_replicas])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a core of a replica."""
        return tuple(self._core(replica, logical_core).tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas that have one of their cores in a process.

        Args:
            task_id: the number of the process.
            logical_core: which of the cores of a replica.

        Raises:
            ValueError: there are none.
        """
        inside = 0 <= logical_core < self.num_cores_per_replica
        tasks = [
            self.topology.task_ordinal_at_coordinates(replica[logical_core])
            for replica in (self.core_assignment if inside else ())
        ]
        replicas = [replica for replica, task in enumerate(tasks) if task == task_id]
        if not replicas:
            raise ArgumentError(
                f"DeviceAssignment.lookup_replicas({task_id}, {logical_core}): no replica has its core "
                f"{logical_core} in process {task_id}. There are {self.topology.num_tasks} processes, "
                f"and replicas have {self.num_cores_per_replica} cores, both counted from 0."
            )
        return replicas

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a core's device among those of its process."""
        core = self._core(replica, logical_core).tolist()
        return self.topology.tpu_device_ordinal_at_coordinates(core)

    def _core(self, replica: int, logical_core: int) -> Ints:
        check_int("replica", replica, 0, self.num_replicas)
        check_int("logical_core", logical_core, 0, self.num_cores_per_replica)
        return self.core_assignment[replica, logical_core]

    def __repr__(self) -> str:
        return (
            f"DeviceAssignment(num_replicas={self.num_replicas}, "
            f"num_cores_per_replica={self.num_cores_per_replica}, topology={self.topology!r})"
        )


def _checked_shape(topology: Topology, name: str, value: Any) -> Ints:
    wanted = f"{topology.mesh_rank} ints >= 1, along the axes (x, y, z, core)"
    with converting(name, value, wanted):
        shape = np.asarray([1] * topology.mesh_rank if value is None else value)
    if shape.shape != (topology.mesh_rank,) or shape.dtype.kind not in "iu" or (shape < 1).any():
        refuse(name, wanted, value)
    return shape.astype(np.int64)


def _blocks(topology: Topology, shape: Ints, stride: Ints) -> Iterator[Ints]:
    """Yields the cores of each block without missing devices, process by process."""
    if (np.maximum(shape, stride) > topology.mesh_shape).any():
        return  # its cores may be too many to enumerate
    footprint = shape * stride
    inside = np.asarray(list(np.ndindex(*shape)), np.int32) * stride
    # With a stride, blocks interleave: each starts at a core that the block before skipped.
    axes = zip(topology.mesh_shape.tolist(), footprint.tolist(), stride.tolist(), strict=True)
    starts = [
        [base + offset for base in range(0, size - length + 1, length) for offset in range(step)]
        for size, length, step in axes
    ]
    blocks = [np.asarray(start, np.int32) + inside for start in itertools.product(*starts)]
    missing = {tuple(core) for core in topology.missing_devices.tolist()}
    complete = [b for b in blocks if missing.isdisjoint(map(tuple, b.tolist()))]
    yield from sorted(complete, key=lambda b: topology.task_ordinal_at_coordinates(b[0]))


publish(globals(), __all__, __name__)
