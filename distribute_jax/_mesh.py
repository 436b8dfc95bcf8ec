"""The mesh of a strategy, with replicas along ``"data"``, and the shardings and copies made from it.

The cores of a replica are along further axes, which are automatic inside ``run``: ``"model"`` or, if their
number is not a prime, one axis for each prime factor, ``"model_0"``, ``"model_1"``, …, so that an array can
be split along several dims. If a device has several replicas, the name of one more axis of size 1 says how
many: ``"replicas_per_device=4"``. So the mesh alone determines the replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from distribute_jax._errors import ArgumentError

DATA = "data"
"""The mesh axis of the replicas."""
MODEL = "model"
"""The mesh axis of the cores of one replica, or the prefix of several."""
GROUP, SHARD = "group", "shard"
"""The axes of the mesh of state that is sharded within groups of devices."""
_PER_DEVICE_PREFIX = "replicas_per_device="

Arrays = TypeVar("Arrays")


def replica_mesh(devices: Any, per_device: int = 1, cores: Sequence[int] | None = None) -> Mesh:
    """Returns a mesh with ``per_device`` replicas on each device, or one on each row of devices.

    ``cores`` are the sizes of the axes of one replica, by default the prime factors of their product.
    The replicas of each process must be contiguous and in the order of the processes, since its rows of a
    batch are.
    """
    grid = np.asarray(devices, dtype=object)
    cores = factors(grid.size // len(grid)) if cores is None else cores
    names = [MODEL] if len(cores) == 1 else [f"{MODEL}_{i}" for i in range(len(cores))]
    # Auto, since newer JAX makes axes Explicit, with which shard_map refuses other shardings than its own.
    shape, names = [len(grid), *cores], [DATA, *names]
    if per_device > 1:
        shape, names = [*shape, 1], [*names, f"{_PER_DEVICE_PREFIX}{per_device}"]
    return Mesh(grid.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def with_replicas(mesh: Mesh, replicas: int) -> Mesh:
    """Returns an abstract mesh like this one with another number of replicas."""
    each = replicas_per_device(mesh)
    if replicas % each:
        raise ArgumentError(
            f"replicas must be a multiple of replicas_per_device={each}; got {replicas}."
        )
    sizes = tuple(replicas // each if name == DATA else n for name, n in mesh.shape.items())
    return cast("Mesh", AbstractMesh(sizes, mesh.axis_names, axis_types=mesh.axis_types))


def state_mesh(mesh: Mesh, shard_over: int | None) -> Mesh:
    """Returns the mesh over which state is sharded: the devices, or groups of ``shard_over`` of them."""
    devices = int(mesh.shape[DATA])
    if shard_over is None or shard_over == devices:
        return mesh
    if shard_over == 1:
        raise ArgumentError(
            "shard_over=1 divides nothing: dj.MirroredStrategy() has the whole model on each device."
        )
    if devices % shard_over:
        raise ArgumentError(
            f"shard_over={shard_over} does not divide the {devices} devices into equal groups."
        )
    sizes, names, kinds = (devices // shard_over, shard_over), (GROUP, SHARD), (AxisType.Auto,) * 2
    if isinstance(mesh, AbstractMesh):
        return cast("Mesh", AbstractMesh(sizes, names, axis_types=kinds))
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=kinds)


def share_axis(mesh: Mesh | AbstractMesh) -> str:
    """Returns the axis of a mesh along which state is sharded."""
    return SHARD if SHARD in mesh.axis_names else DATA


def factors(number: int) -> list[int]:
    """Returns the prime factors of a number in ascending order."""
    least = next((i for i in range(2, number + 1) if number % i == 0), None)
    return [] if least is None else [least, *factors(number // least)]


@functools.lru_cache
def num_replicas(mesh: Mesh) -> int:
    return int(mesh.shape[DATA]) * replicas_per_device(mesh)


@functools.lru_cache
def replicas_per_device(mesh: Mesh) -> int:
    """Returns how many replicas each device of a mesh runs in turn."""
    numbers = (name.partition(_PER_DEVICE_PREFIX)[2] for name in mesh.axis_names)
    return next((int(number) for number in numbers if number), 1)


def cores_per_replica(mesh: Mesh) -> int:
    return int(mesh.size // mesh.shape[DATA])


def local_replicas(mesh: Mesh) -> range:
    """Returns the replicas on this process's devices, which are contiguous."""
    first_cores = mesh.devices.reshape(mesh.shape[DATA], -1)[:, 0]
    local = [i for i, d in enumerate(first_cores) if d.process_index == jax.process_index()]
    each = replicas_per_device(mesh)
    return range(local[0] * each, (local[-1] + 1) * each) if local else range(0)


def first_replica(mesh: Mesh) -> Mesh:
    """Returns the mesh of this process's first replica alone, with all of its cores."""
    first = local_replicas(mesh).start // replicas_per_device(mesh)
    names = [name for name in mesh.axis_names if not name.startswith(_PER_DEVICE_PREFIX)]
    devices = mesh.devices[first : first + 1].reshape(
        [1, *(mesh.shape[name] for name in names[1:])]
    )
    return Mesh(devices, names, axis_types=mesh.axis_types[: len(names)])


def manual_axes(mesh: Mesh) -> set[str]:
    """Returns the axes that are manual inside ``run``: all but those of a replica's cores."""
    return {name for name in mesh.axis_names if not name.startswith(MODEL)}


@functools.lru_cache
def is_local(mesh: Mesh) -> bool:
    """True if all devices of a mesh belong to this process."""
    return {d.process_index for d in mesh.devices.flat} == {jax.process_index()}


def inside_replica(mesh: Mesh) -> AbstractMesh:
    """Returns the mesh that code inside ``run`` sees, with manual and automatic axes."""
    manual = manual_axes(mesh)
    kinds = tuple(AxisType.Manual if name in manual else AxisType.Auto for name in mesh.axis_names)
    return mesh.abstract_mesh.update(axis_types=kinds)


@functools.lru_cache
def mirrored_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is replicated over the mesh."""
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache
def split_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array whose dim 0 is divided among the replicas."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def sharding_over(value: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding of an array that is divided over this very mesh, otherwise None."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    other = sharding.mesh
    same = other is mesh or (
        other.axis_names == mesh.axis_names and other.devices.tolist() == mesh.devices.tolist()
    )
    return NamedSharding(mesh, sharding.spec) if same else None


def outside_mesh() -> AbstractContextManager[None]:
    """Returns a context without a mesh, with ``explicit_transfers``, for computations of the library.

    Inside ``scope()``, JAX refuses to compute on a single shard.
    """
    return explicit_transfers() if jax.sharding.get_abstract_mesh().empty else _without_mesh()


@contextmanager
def _without_mesh() -> Iterator[None]:
    with jax.set_mesh(cast("Any", None)), explicit_transfers():
        yield


def in_device_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding in the default memory, the only one with which JAX computes."""
    return NamedSharding(sharding.mesh, sharding.spec)


def in_default_memory(array: jax.Array) -> jax.Array:
    """Returns an array in the default memory, the only one with which JAX computes."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding == in_device_memory(sharding):
        return array
    return jax.device_put(array, in_device_memory(sharding))


def put(value: Any, to: Sharding) -> Any:
    """Places an array, or a pytree of arrays, as a sharding says.

    ``jax.device_put`` would first gather the value from all processes to compare it. Here each process
    places its own shards; the caller knows that the value is the same on all processes.
    """
    if isinstance(value, jax.Array) and value.sharding.device_set != to.device_set:
        value = in_default_memory(value)  # JAX moves arrays between devices in default memory only
    if to.is_fully_addressable:
        # JAX moves an array of several processes to one process only from that process's own shards.
        is_global = isinstance(value, jax.Array) and not value.is_fully_addressable
        return jax.device_put(local_copy_of_replicated(value) if is_global else value, to)
    return jax.tree.map(lambda leaf: _put_local_shards(leaf, to), value)


def _put_local_shards(value: Any, to: Sharding) -> jax.Array:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.device_put(value, to)
    with outside_mesh():
        whole = value if isinstance(value, jax.Array) else jax.numpy.asarray(value)
        shards = [
            jax.device_put(whole[index or ...], device)
            for device, index in to.addressable_devices_indices_map(whole.shape).items()
        ]
    return jax.make_array_from_single_device_arrays(whole.shape, to, shards, dtype=whole.dtype)


_NO_GUARD = nullcontext()
_WAYS = "host_to_device", "device_to_device", "device_to_host"
_GUARDS = [f"jax_transfer_guard_{way}" for way in _WAYS]


def transfers_are_guarded() -> bool:
    """True if JAX logs or refuses transfers that are not explicit."""
    guards = [getattr(jax.config, guard) for guard in _GUARDS]
    return "log" in guards or "disallow" in guards


def explicit_transfers() -> AbstractContextManager[None]:
    """Returns a context in which JAX's guard takes transfers as explicit, as those of ``device_put`` are."""
    return jax.transfer_guard("allow") if transfers_are_guarded() else _NO_GUARD


def program_input(value: np.ndarray[Any, Any], mesh: Mesh) -> Any:
    """Returns an array for a compiled program, which is not transferred before unless JAX guards that."""
    if (context := explicit_transfers()) is _NO_GUARD:
        return value
    with context:
        return jax.make_array_from_callback(value.shape, mirrored_sharding(mesh), value.__getitem__)


def local_copy_of_replicated(array: jax.Array) -> jax.Array:
    """Returns all of an array on one device of this process.

    If the array is sharded over processes, that is a collective: all of them call this together, and the
    sharding must be a ``NamedSharding``.
    """
    return array if array.is_fully_addressable else replicated(array).addressable_data(0)


def replicated(array: jax.Array) -> jax.Array:
    """Returns an array replicated over its devices; a collective, as ``local_copy_of_replicated``."""
    if array.is_fully_replicated:
        return array
    if not isinstance(array.sharding, NamedSharding):
        raise ArgumentError(
            f"An array {array.dtype}{list(array.shape)} is divided among the processes by "
            f"{array.sharding}, which is not a NamedSharding. Give it one: jax.device_put(array, "
            "jax.NamedSharding(mesh, spec))."
        )
    with outside_mesh():
        return wait_on_cpu(_replicating(NamedSharding(array.sharding.mesh, PartitionSpec()))(array))


def wait_on_cpu(arrays: Arrays) -> Arrays:
    """Blocks until arrays that several CPU devices compute outside of a step are ready.

    On CPU the collectives of two independent programs can take each other's threads and deadlock.
    """
    first = jax.tree.leaves(arrays)[0]
    devices = () if isinstance(first, jax.core.Tracer) else first.sharding.device_set
    if len(devices) > 1 and next(iter(devices)).platform == "cpu":
        jax.block_until_ready(arrays)
    return arrays


def on_host(value: Any) -> np.ndarray[Any, Any]:
    """Returns all of an array on the host; a collective, as ``local_copy_of_replicated``."""
    return np.asarray(local_copy_of_replicated(value) if isinstance(value, jax.Array) else value)


@functools.lru_cache(maxsize=16)
def _replicating(whole: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=whole)
