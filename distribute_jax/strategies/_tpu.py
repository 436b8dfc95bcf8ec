"""``TPUStrategy``: data parallelism over the cores of a TPU; a replica may have several cores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh, PartitionSpec

from distribute_jax import _frames, processes
from distribute_jax._checks import check_choice, check_int
from distribute_jax._errors import ArgumentError, ContextError, MixedStrategiesError
from distribute_jax._mesh import DATA, cores_per_replica, factors, replica_mesh
from distribute_jax._messages import leaf_text
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.processes import ClusterOptions
from distribute_jax.program import Rules
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import check_replicas_per_device, log_no_tpu
from distribute_jax.tpu.experimental import DeviceAssignment


class TPUStrategy(Strategy):
    """Trains on all cores of a TPU; each replica holds the whole model.

    The same program is started once on each host. Making the strategy connects the hosts through
    ``jax.distributed``, so make it before anything else that computes. Each core is a replica, or, with a
    device assignment, each block of cores: then a step says with ``experimental_split_to_logical_devices``
    which arrays its cores share, and XLA divides the work. Replicas are numbered process by process, within
    one so that neighbours in the network follow each other, or in the order of the assignment.

    It runs on any devices, simulated ones too: ``TPUClusterResolver("local")`` takes what is there.

    Args:
        tpu_cluster_resolver: describes the hosts, any of ``dj.cluster_resolver``. If None, the hosts are
            detected from the environment; if there are none, this process is the only one.
        experimental_device_assignment: what ``DeviceAssignment.build`` returned: the cores of each replica.
            All cores of a replica belong to one process.
        experimental_spmd_xla_partitioning: accepted for TensorFlow's signature, and True: XLA always
            partitions one program for all cores.
        rules: what divides the state over the cores of each replica, as in ``ModelParallelStrategy``;
            ``"model"`` is all of its cores.
        replicas_per_device: how many replicas each core, or block of cores, runs one after the other, as in
            ``MirroredStrategy``.
        cluster_options: how long the processes wait for each other.
        steps_in_flight: as in ``MirroredStrategy``.
        axis_name: as in ``MirroredStrategy``.

    Raises:
        ValueError: no resolver, an assignment that spreads a replica over processes, or another argument.
        BackendStartedError: JAX has already started its devices; a ``RuntimeError``.
        ClusterError: the cluster is described wrongly, or the processes cannot connect; a ``RuntimeError``.
        DeadlineExceededError: a process did not connect in time; a ``TimeoutError``.

    Example:
        >>> import distribute_jax as dj
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> topology = dj.initialize_tpu_system(resolver)
        >>> assignment = dj.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
        >>> strategy = dj.TPUStrategy(resolver, experimental_device_assignment=assignment)
        >>> strategy.num_replicas_in_sync, dict(strategy.mesh.shape)
        (4, {'data': 4, 'model': 2})

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = True,
        *,
        rules: Mapping[str, PartitionSpec | str | None] | None = None,
        replicas_per_device: int = 1,
        cluster_options: ClusterOptions | None = None,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        name = type(self).__name__
        spmd = f"{name}(experimental_spmd_xla_partitioning)"
        check_choice(spmd, experimental_spmd_xla_partitioning, (True,))
        each = check_replicas_per_device(name, replicas_per_device)
        self._resolver = processes.connect(tpu_cluster_resolver, cluster_options, name)
        if experimental_device_assignment is None:
            log_no_tpu(name)
            replicas: list[Any] = in_topology_order(jax.devices())
        else:
            replicas = _checked_assignment(experimental_device_assignment, name)
        mesh = replica_mesh(replicas, each)
        super().__init__(
            mesh,
            steps_in_flight=steps_in_flight,
            rules=None if rules is None else Rules(rules, mesh, name),
            axis_name=axis_name,
        )

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> jax.Array:
        """Returns an array of a replica of one core, and refuses where there are several.

        TensorFlow can pin what follows to one core; XLA here always divides one program over all.

        Args:
            tensor: an array in a step (one replica's view).
            logical_device_id: the core, from 0 to the number of cores of a replica less 1.

        Raises:
            ValueError: there is no such core, or there are several.
            RuntimeError: called outside of ``run``.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy#experimental_assign_to_logical_device
        """
        method = "experimental_assign_to_logical_device"
        array, cores = self._checked_array(tensor, method), cores_per_replica(self.mesh)
        check_int(f"{method}(logical_device_id)", logical_device_id, 0, cores)
        if cores > 1:
            raise ArgumentError(
                f"{method} cannot assign {leaf_text(array)} to one core: XLA partitions one program for all "
                f"{cores} cores of a replica (SPMD), and none of them computes a part of it alone. Split it "
                "with experimental_split_to_logical_devices(tensor, partition_dimensions), or leave the call "
                "out and let XLA choose."
            )
        return array

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> jax.Array:
        """Divides an array of a step over the cores of its replica: each holds and computes one part.

        It changes no number. What is computed from the array is divided accordingly, as XLA sees fit, and so
        is its gradient.

        Args:
            tensor: an array in a step (one replica's view).
            partition_dimensions: into how many parts each dim is cut. The product is the number of
                cores of a replica, and each number divides the size of its dim.

        Returns:
            The same array, divided.

        Raises:
            ValueError: the numbers do not fit the array, or the cores.
            RuntimeError: called outside of ``run``, or in a step that another strategy runs.

        Example:
            >>> import distribute_jax as dj, jax.numpy as jnp
            >>> topology = dj.initialize_tpu_system(dj.cluster_resolver.TPUClusterResolver("local"))
            >>> assignment = dj.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2])
            >>> strategy = dj.TPUStrategy(experimental_device_assignment=assignment)
            >>> def step(images):
            ...     images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1])
            ...     return jnp.square(images).sum()
            >>> float(strategy.run(step, args=(jnp.ones((4, 8, 8)),)))
            256.0

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy#experimental_split_to_logical_devices
        """
        method = "experimental_split_to_logical_devices"
        array = self._checked_array(tensor, method)
        counts = _checked_counts(array, partition_dimensions, self.mesh, method)
        return _constrained(array, _axes_for(counts, self.mesh))

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> jax.Array:
        """Replicates an array of a step over the cores of its replica.

        Args:
            tensor: an array in a step (one replica's view).

        Returns:
            The same array, with a full copy on each core.

        Raises:
            ValueError: it is not an array.
            RuntimeError: called outside of ``run``, or in a step that another strategy runs.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy#experimental_replicate_to_logical_devices
        """
        array = self._checked_array(tensor, "experimental_replicate_to_logical_devices")
        return _constrained(array, [()] * array.ndim)

    def _checked_array(self, tensor: Any, method: str) -> jax.Array:
        if not _frames.in_replica_context():
            raise ContextError(
                f"{method} was called outside of run, where no program is compiled whose arrays it could "
                "place. Call it in the function given to strategy.run, on the arrays there."
            )
        if jax.sharding.get_abstract_mesh().axis_names != self.mesh.axis_names:
            raise MixedStrategiesError(
                f"{method} was called in a step that {_frames.current().strategy!r} runs. Call it on the "
                "strategy that runs the step, dj.get_strategy() there."
            )
        if not isinstance(tensor, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            raise ArgumentError(f"{method}: tensor must be one array; got {leaf_text(tensor)}.")
        return jnp.asarray(tensor)


def _constrained(array: jax.Array, dims: Sequence[tuple[str, ...]]) -> jax.Array:
    if not any(dims):  # one core
        return array
    spec = PartitionSpec(*(names or None for names in dims))
    return jax.lax.with_sharding_constraint(array, spec)


def _axes_for(counts: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]]:
    """Returns for each dim the mesh axes whose sizes multiply to its number of parts."""
    free = {name: size for name, size in mesh.shape.items() if name != DATA}
    dims = []
    for count in counts:
        names = []
        for prime in factors(count):
            name = next(name for name, size in free.items() if size == prime)
            names.append(name)
            del free[name]
        dims.append(tuple(names))
    return dims


def _checked_counts(array: jax.Array, counts: Any, mesh: Mesh, method: str) -> list[int]:
    cores, name = cores_per_replica(mesh), f"{method}(partition_dimensions)"
    if not isinstance(counts, (list, tuple, np.ndarray)) or len(counts) != array.ndim:
        raise ArgumentError(
            f"{name} must be a list of {array.ndim} numbers of parts, one for each dim of "
            f"{leaf_text(array)}; got {counts!r:.80}."
        )
    parts = [check_int(name, count) for count in counts]
    if math.prod(parts) != cores:
        raise ArgumentError(
            f"{name} must multiply to {cores}, the number of cores of a replica, each of which holds one "
            f"part; got {parts}."
        )
    bad = [i for i, (size, n) in enumerate(zip(array.shape, parts, strict=True)) if size % n]
    if bad:
        lines = ", ".join(f"dim {i} of size {array.shape[i]} into {parts[i]} parts" for i in bad)
        raise ArgumentError(
            f"{method} cannot cut {leaf_text(array)}: {lines}. Each number divides the size of its dim: "
            "choose other dims, or pad the array."
        )
    return parts


def in_topology_order(devices: Sequence[Any]) -> list[Any]:
    """Orders devices process by process, and within a process so that neighbours are adjacent.

    JAX's order over all processes may alternate between them, but the replicas of a process must be
    contiguous, as its rows of a batch are.
    """
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    if all(device.platform != "tpu" for device in devices):
        return devices
    ordered: list[Any] = []
    for _, group in itertools.groupby(devices, lambda device: device.process_index):
        local = list(group)
        ordered += create_device_mesh((len(local),), local, allow_split_physical_axes=True).tolist()
    return ordered


def _checked_assignment(assignment: DeviceAssignment, caller: str) -> list[list[Any]]:
    """Returns the devices of each replica; raises if a strategy cannot use the assignment."""
    tasks = [{device.process_index for device in r} for r in assignment.devices]
    split = [i for i, owners in enumerate(tasks) if len(owners) > 1]
    if split:
        raise ArgumentError(
            f"{caller}: the cores of replicas {split[:4]} of {assignment!r} belong to processes "
            f"{sorted(tasks[split[0]])}. All cores of a replica must belong to one process, which brings "
            "its rows: choose a computation_shape that fits the devices of one process "
            f"({assignment.topology.num_tpus_per_task})."
        )
    order = [process for owners in tasks for process in owners]
    counts = {order.count(task) for task in range(assignment.topology.num_tasks)}
    if order != sorted(order) or len(counts) > 1:
        raise ArgumentError(
            f"{caller}: the replicas of {assignment!r} belong to processes {order[:16]}. Each process must "
            "have as many replicas, in the order of the processes, as DeviceAssignment.build returns them: "
            "choose num_replicas so that it uses as many devices of each process."
        )
    return assignment.devices
