"""The cores of a TPU: their coordinates, which of them make a replica, and the replicas' order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh

from distribute_jax._errors import ArgumentError

Ints = np.ndarray[Any, np.dtype[np.int32]]


class Topology:
    """The cores of all processes, by their coordinates (x, y, z, core on the chip).

    ``initialize_tpu_system`` gives one. A TPU tells the coordinates itself; several slices lie one after
    the other along x. Devices that have no coordinates, such as simulated ones, are laid out as the chips of
    a TPU v3 host, of two cores each and two chips wide, one host after the other along y.

    Args:
        devices: all devices of all processes, as ``jax.devices()`` gives them; every process has as many.

    Raises:
        ValueError: there are no devices, or the processes do not have equally many.

    Example:
        >>> import distribute_jax as dj, jax
        >>> topology = dj.tpu.experimental.Topology(jax.devices()[:8])
        >>> topology.mesh_shape.tolist(), topology.num_tasks, topology.num_tpus_per_task
        ([2, 2, 1, 2], 1, 8)

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/Topology
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        by_process = sorted(devices, key=lambda device: (device.process_index, device.id))
        counts = set(Counter(device.process_index for device in by_process).values())
        if len(counts) != 1:
            raise ArgumentError(
                f"Topology(devices={list(map(str, devices))[:8]}): every process has to have as many "
                f"devices, one at least, but the numbers are {sorted(counts)}. Pass jax.devices()."
            )
        self._devices, self._per_task = by_process, counts.pop()
        at = np.asarray(_coordinates(by_process, self._per_task), np.int32)
        at -= at.min(0)
        self._mesh_shape: Ints = at.max(0) + 1
        self._coordinates: Ints = at.reshape(-1, self._per_task, at.shape[-1])
        self._numbers: Ints = np.full(self._mesh_shape, -1, np.int32)
        self._numbers[tuple(at.T)] = np.arange(len(at))

    @property
    def mesh_shape(self) -> Ints:
        """How many cores there are along each axis, int32 of shape (4,)."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of axes: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Ints:
        """Where each device lies, int32 of shape (processes, devices of each, 4)."""
        return self._coordinates

    @property
    def missing_devices(self) -> Ints:
        """The coordinates within ``mesh_shape`` at which there is no device, of shape (missing, 4)."""
        return np.argwhere(self._numbers < 0).astype(np.int32)

    @property
    def num_tasks(self) -> int:
        """The number of processes."""
        return len(self._coordinates)

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each process."""
        return self._per_task

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Gives the process that has the device at these coordinates, as a number from 0 on.

        Raises:
            ValueError: there is no device.
        """
        return self._number_at(device_coordinates) // self._per_task

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Gives the number of the device at these coordinates among those of its process.

        Raises:
            ValueError: there is no device.
        """
        return self._number_at(device_coordinates) % self._per_task

    def device_at_coordinates(self, device_coordinates: Sequence[int]) -> jax.Device:
        """Gives the device at these coordinates.

        Raises:
            ValueError: there is no device.
        """
        return self._devices[self._number_at(device_coordinates)]

    def _number_at(self, coordinates: Sequence[int]) -> int:
        at = tuple(int(one) for one in coordinates)
        inside = len(at) == self.mesh_rank and all(
            0 <= one < size for one, size in zip(at, self._mesh_shape, strict=True)
        )
        number = int(self._numbers[at]) if inside else -1
        if number < 0:
            raise ArgumentError(
                f"There is no device at the coordinates {at} of {self!r}. Coordinates are four ints, "
                "(x, y, z, core), each below that of topology.mesh_shape."
            )
        return number

    def __repr__(self) -> str:
        """Names the shape and the numbers of processes and devices."""
        return (
            f"Topology(mesh_shape={self._mesh_shape.tolist()}, num_tasks={self.num_tasks}, "
            f"num_tpus_per_task={self._per_task})"
        )


def _coordinates(devices: Sequence[Any], per_task: int) -> list[tuple[int, ...]]:
    if not all(hasattr(device, "coords") for device in devices):
        return [_simulated(number, per_task) for number in range(len(devices))]
    width = 1 + max(device.coords[0] for device in devices)
    return [
        (
            device.coords[0] + width * (getattr(device, "slice_index", 0) or 0),
            *device.coords[1:],
            device.core_on_chip,
        )
        for device in devices
    ]


def _simulated(number: int, per_task: int) -> tuple[int, ...]:
    """Lays the devices of a process out as a host of a TPU v3, with what is odd in one row."""
    task, place = divmod(number, per_task)
    cores = 2 if per_task % 2 == 0 else 1
    chip, core = divmod(place, cores)
    chips = per_task // cores
    wide = 2 if chips % 2 == 0 else 1
    return chip % wide, task * (chips // wide) + chip // wide, 0, core


class DeviceAssignment:
    """Which cores each replica has: replica by replica, the coordinates of its cores in order.

    ``build`` divides the topology into blocks, and is simpler than the constructor.

    Args:
        topology: what ``initialize_tpu_system`` gave.
        core_assignment: ints of shape (replicas, cores of each, 4): the coordinates of every core.

    Raises:
        ValueError: ``topology`` is none, the array has another shape, names a core twice, or one that is
            not there.

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
        self._topology = _checked_topology(topology, "DeviceAssignment")
        cores = np.asarray(core_assignment, np.int32)
        if cores.ndim != 3 or cores.shape[-1] != topology.mesh_rank or not cores.size:
            raise ArgumentError(
                f"DeviceAssignment(core_assignment=…) got an array of shape {cores.shape}. It has the "
                f"coordinates of every core: (replicas, cores of each, {topology.mesh_rank})."
            )
        each = [tuple(core) for core in cores.reshape(-1, cores.shape[-1]).tolist()]
        twice = sorted({core for core in each if each.count(core) > 1})
        if twice:
            raise ArgumentError(
                f"DeviceAssignment(core_assignment=…) names the cores {twice[:4]} more than once. Every "
                "core belongs to one replica, and is one of its cores."
            )
        self._cores: Ints = cores
        self._devices = [
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
            topology: what ``initialize_tpu_system`` gave.
            computation_shape: the cores of one replica along each of the axes (x, y, z, core);
                ``[1, 1, 1, 2]`` takes the two cores of one chip. One core if None.
            computation_stride: how far apart the cores of a replica are along each axis; 1 if None.
            num_replicas: how many replicas; the first blocks are taken.

        Returns:
            The assignment.

        Raises:
            ValueError: a shape is not of four positive ints, or so many replicas do not fit.

        Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceAssignment#build
        """
        _checked_topology(topology, "DeviceAssignment.build")
        shape = _checked_shape(topology, "computation_shape", computation_shape)
        stride = _checked_shape(topology, "computation_stride", computation_stride)
        blocks = list(_blocks(topology, shape, stride))
        is_int = isinstance(num_replicas, int) and not isinstance(num_replicas, bool)
        if not is_int or not 1 <= num_replicas <= len(blocks):
            raise ArgumentError(
                f"DeviceAssignment.build(num_replicas={num_replicas!r}): {len(blocks)} replicas of "
                f"computation_shape={shape.tolist()} and computation_stride={stride.tolist()} fit in "
                f"{topology!r}. Ask for 1 to {len(blocks)} of them."
                if blocks
                else f"DeviceAssignment.build: computation_shape={shape.tolist()} with "
                f"computation_stride={stride.tolist()} does not fit in {topology!r}. Choose a shape "
                "that does, such as [1, 1, 1, 1]."
            )
        return DeviceAssignment(topology, blocks[:num_replicas])

    @property
    def topology(self) -> Topology:
        """The topology."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self._cores)

    @property
    def num_cores_per_replica(self) -> int:
        """The number of cores of each replica."""
        return int(self._cores.shape[1])

    @property
    def core_assignment(self) -> Ints:
        """The coordinates of every core, int32 of shape (replicas, cores of each, 4)."""
        return self._cores

    @property
    def devices(self) -> list[list[jax.Device]]:
        """The devices of each replica, in order."""
        return [list(replica) for replica in self._devices]

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Gives the coordinates of a core of a replica."""
        return tuple(self._cores[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Gives the replicas that have one of their cores in a process.

        Args:
            task_id: the number of the process.
            logical_core: which of the cores of a replica.

        Raises:
            ValueError: there is none.
        """
        inside = 0 <= logical_core < self.num_cores_per_replica
        tasks = [
            self._topology.task_ordinal_at_coordinates(replica[logical_core])
            for replica in (self._cores if inside else ())
        ]
        found = [replica for replica, task in enumerate(tasks) if task == task_id]
        if not found:
            raise ArgumentError(
                f"DeviceAssignment.lookup_replicas({task_id}, {logical_core}): no replica has its core "
                f"{logical_core} in process {task_id}. There are {self._topology.num_tasks} processes, "
                f"and replicas have {self.num_cores_per_replica} cores, both counted from 0."
            )
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Gives the number of a core's device among those of its process."""
        return self._topology.tpu_device_ordinal_at_coordinates(self._cores[replica, logical_core])

    def __repr__(self) -> str:
        """Names the numbers of replicas and cores, and the topology."""
        return (
            f"DeviceAssignment(num_replicas={self.num_replicas}, "
            f"num_cores_per_replica={self.num_cores_per_replica}, topology={self._topology!r})"
        )


def _checked_topology(topology: Any, caller: str) -> Topology:
    if not isinstance(topology, Topology):
        raise ArgumentError(
            f"{caller}(topology={topology!r:.80}): this is no Topology. Pass what "
            "dj.tpu.experimental.initialize_tpu_system(resolver) gives."
        )
    return topology


def _checked_shape(topology: Topology, name: str, given: Any) -> Ints:
    shape = np.asarray([1] * topology.mesh_rank if given is None else given)
    if shape.shape != (topology.mesh_rank,) or shape.dtype.kind not in "iu" or (shape < 1).any():
        raise ArgumentError(
            f"DeviceAssignment.build({name}={given!r}): it is {topology.mesh_rank} ints of at least 1, "
            "along the axes (x, y, z, core), such as [1, 1, 1, 2] for the two cores of a chip."
        )
    return shape.astype(np.int32)


def _blocks(topology: Topology, shape: Ints, stride: Ints) -> Iterator[Ints]:
    """Gives the cores of each block that is wholly there, process by process."""
    footprint = shape * stride
    inside = np.asarray(list(np.ndindex(*shape)), np.int32) * stride
    # With a stride, blocks are woven into each other: each starts where the last has left a core out.
    starts = itertools.product(
        *(
            [
                base + offset
                for base in range(0, size - print_ + 1, print_)
                for offset in range(step)
            ]
            for size, print_, step in zip(
                topology.mesh_shape.tolist(), footprint.tolist(), stride.tolist(), strict=True
            )
        )
    )
    blocks = [np.asarray(start, np.int32) + inside for start in starts]
    missing = {tuple(core) for core in topology.missing_devices.tolist()}
    there = [b for b in blocks if missing.isdisjoint(map(tuple, b.tolist()))]
    yield from sorted(there, key=lambda b: topology.task_ordinal_at_coordinates(b[0]))


def in_topology_order(devices: Sequence[Any]) -> list[Any]:
    """Orders devices process by process, and within a process so that neighbours follow each other.

    JAX orders the chips of one process; over all processes its order may go back and forth between them,
    but the replicas of a process have to be one run, since its rows of a batch are one.
    """
    known = sorted(devices, key=lambda device: (device.process_index, device.id))
    by_process = [list(own) for _, own in itertools.groupby(known, lambda d: d.process_index)]
    return [device for own in by_process for device in _of_one_process(own)]


def _of_one_process(devices: list[Any]) -> list[Any]:
    if devices[0].platform != "tpu":
        return devices
    return list(create_device_mesh((len(devices),), devices, allow_split_physical_axes=True).flat)


def checked_assignment(given: Any, caller: str) -> list[list[Any]]:
    """Gives the devices of each replica of an assignment that a strategy can work with."""
    if not isinstance(given, DeviceAssignment):
        raise ArgumentError(
            f"{caller}(experimental_device_assignment={given!r:.80}): this is no DeviceAssignment. Pass "
            "dj.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], "
            "num_replicas=4), or leave it out: one replica for each core."
        )
    replicas = given.devices
    owners = [sorted({device.process_index for device in replica}) for replica in replicas]
    split = [i for i, processes in enumerate(owners) if len(processes) > 1]
    if split:
        raise ArgumentError(
            f"{caller}: the cores of replicas {split[:4]} of {given!r} belong to processes "
            f"{owners[split[0]]}. All cores of a replica belong to one process, which brings its rows: "
            "choose a computation_shape that fits the devices of one process "
            f"({given.topology.num_tpus_per_task})."
        )
    order = [processes[0] for processes in owners]
    counts = {order.count(task) for task in range(given.topology.num_tasks)}
    if order != sorted(order) or len(counts) > 1:
        raise ArgumentError(
            f"{caller}: the replicas of {given!r} belong to processes {order[:16]}. Each process has as "
            "many replicas, which follow each other in the order of the processes: "
            "DeviceAssignment.build gives such an order; choose num_replicas so that it takes as many of "
            "each process."
        )
    return replicas
