"""Checks that copies of arrays have the same bits on all devices, by hashing on the devices."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from distribute_jax import _context
from distribute_jax._errors import ArgumentError, DonatedError, OutOfSyncError
from distribute_jax._mesh import in_default_memory, outside_mesh
from distribute_jax._messages import PyTree, is_key, leaf_text, listed, on_bits, path_text
from distribute_jax._values import PerReplica
from distribute_jax.processes import current_job, naming_other_processes

_AXIS = "device"
_by_id = attrgetter("id")

_UNEQUAL = """\
Values that should be equal on all devices are not:
{lines}
The replicas have been training different models. Restore a checkpoint, or use the copy of one device on \
all: array = jax.device_put(np.asarray(array.addressable_shards[0].data), array.sharding). Likely \
causes are RunOptions(check_sync=False), dj.assume_mirrored of a value that was not mirrored, arrays \
assembled by hand, or a faulty device."""


_Named: TypeAlias = tuple[str, jax.Array]


def check_in_sync(tree: PyTree) -> None:
    """Raises if devices that should have the same value differ in any bit.

    Every device hashes its copies of all leaves, in one program, and the hashes, eight bytes for each
    leaf and device, are gathered; no array is transferred. 0.0 and -0.0 differ, and so do NaNs with
    different bits.

    Devices that have the same part of an array are compared: all of them for a mirrored array, those
    with the same shard for a sharded one. ``PerReplica`` values differ by design, and NumPy arrays and
    Python numbers are not on devices: both are ignored. In a job of several processes each must call
    this with the same tree.

    Args:
        tree: NNX objects, such as models, optimizers and metrics, or a pytree of them and of arrays.

    Raises:
        ValueError: an array differs: ``OutOfSyncError``, with its path and the devices that differ
            from the majority. Or there is no array in ``tree``.
        RuntimeError: called inside ``run`` or under jit, or an array was donated.

    Example:
        >>> import distribute_jax as dj
        >>> from flax import nnx
        >>> strategy = dj.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> dj.check_in_sync(model)
    """
    _context.require_cross_replica("check_in_sync")
    _context.require_outside_step("check_in_sync")
    _context.require_untraced("check_in_sync")
    leaves = list(_arrays(tree))
    if not leaves:
        raise ArgumentError(
            f"check_in_sync got {leaf_text(tree)}, which has no jax.Array to compare."
        )
    if donated := [name for name, array in leaves if array.is_deleted()]:
        raise DonatedError(
            f"check_in_sync got arrays that were donated to an earlier step:\n{listed(donated)}\nPass the "
            "model itself, whose variables have the new ones, or keep dj.snapshot(model)."
        )
    is_alone = all(array.is_fully_addressable for _, array in leaves)
    if not is_alone:
        current_job().actions.record(f"dj.check_in_sync of {len(leaves)} arrays")
    with naming_other_processes("dj.check_in_sync", is_alone):
        Hashes(leaves).check()


def out_of_sync(named: Sequence[_Named]) -> list[str]:
    """Returns a line for each array that differs between devices that should have the same bits."""
    return Hashes([leaf for name, array in named for leaf in _arrays(array, name)]).lines()


class Hashes:
    """The hashes of arrays on each device, computed asynchronously; reading them waits."""

    def __init__(self, leaves: Iterable[_Named]) -> None:
        groups: dict[_CopyLayout, list[_Named]] = {}
        for leaf in leaves:
            if (layout := _copy_layout(leaf[1].sharding, leaf[1].shape)) is not None:
                groups.setdefault(layout, []).append(leaf)
        self._groups = [
            (layout.mesh, group, layout.hashes(group)) for layout, group in groups.items()
        ]

    def check(self) -> None:
        if lines := self.lines():
            raise OutOfSyncError(_UNEQUAL.format(lines=listed(lines)))

    def lines(self) -> list[str]:
        """Returns a line for each array that differs between devices with the same part of it."""
        return [line for group in self._groups for line in _lines(*group)]


def hashes_of(tree: PyTree) -> Hashes:
    """Starts to hash all arrays of a tree."""
    return Hashes(_arrays(tree))


class _CopyLayout(NamedTuple):
    """The devices that have copies of an array, as a mesh."""

    mesh: Mesh
    is_replicated: bool
    """True if the array is replicated over this mesh; otherwise it has shards on its devices."""

    def view(self, array: jax.Array) -> jax.Array:
        """Returns an array whose copy on each device is the shard there, so that a program can read each."""
        array = in_default_memory(array)
        if self.is_replicated:
            return array
        parts = [shard.data for shard in array.addressable_shards]
        shape = array.sharding.shard_shape(array.shape)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_single_device_arrays(shape, replicated, parts, dtype=array.dtype)

    def hashes(self, leaves: Sequence[_Named]) -> jax.Array:
        with outside_mesh():
            return _hash_program(self.mesh)([self.view(array) for _, array in leaves])


@functools.lru_cache(maxsize=4096)
def _copy_layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _CopyLayout | None:
    """Returns where the copies of an array are; None if no part of it is on several devices."""
    devices = sorted(sharding.device_set, key=_by_id)
    if math.prod(sharding.shard_shape(shape)) * len(devices) == math.prod(shape):
        return None
    auto = (AxisType.Auto,)
    # The arrays themselves can be hashed; assembling others is slow.
    if (
        isinstance(sharding, NamedSharding)
        and sharding.is_fully_replicated
        and {*sharding.mesh.axis_types} == {*auto}
    ):
        return _CopyLayout(cast("Mesh", sharding.mesh), is_replicated=True)
    mesh = Mesh(np.asarray(devices, dtype=object), (_AXIS,), axis_types=auto)
    return _CopyLayout(mesh, is_replicated=False)


def as_bits(array: jax.Array) -> jax.Array:
    """Returns random keys as their numbers, and other arrays as they are."""
    return jax.random.key_data(array) if is_key(array) else array


def _arrays(tree: PyTree, root: str = "") -> Iterator[_Named]:
    """Yields every array and its path, also those in NNX objects; random keys as numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_branch):
        name = root + jax.tree_util.keystr(path)
        if isinstance(leaf, nnx.Pytree):
            for parts, value in nnx.to_flat_state(nnx.state(leaf)):
                yield from _arrays(value, name + "".join(map(_attribute, parts)))
        elif isinstance(leaf, nnx.Variable):
            yield from _arrays(leaf.get_raw_value(), name)
        elif isinstance(leaf, jax.Array):
            yield path_text((), name.lstrip(".")), as_bits(leaf)


def _is_branch(node: Any) -> bool:
    return isinstance(node, (nnx.Pytree, nnx.Variable, PerReplica))


def _attribute(part: Any) -> str:
    return f"[{part!r}]" if isinstance(part, int) else f".{part}"


def _lines(mesh: Mesh, leaves: Sequence[_Named], hashed: jax.Array) -> Iterator[str]:
    hashes = np.asarray(hashed)
    # The usual case. Otherwise the difference may be between shards, which may differ.
    if (hashes == hashes[:1]).all():
        return
    for k, (name, array) in enumerate(leaves):
        for odd, rest in _differing(mesh, array, hashes[:, k]):
            yield f"{name}, {leaf_text(array)}: {_names(odd)} unequal to {_names(rest)}"


def _differing(
    mesh: Mesh, array: jax.Array, hashes: Any
) -> Iterator[tuple[list[jax.Device], list[jax.Device]]]:
    """Yields, for each part of an array, the devices whose copy differs and the majority of the others."""
    bits = {device: hashes[i].tobytes() for i, device in enumerate(mesh.devices.flat)}
    for group in _devices_by_part(array):
        # Of two equal halves, the one with the first device counts as the majority.
        majority = Counter(bits[device] for device in group).most_common(1)[0][0]
        odd = [device for device in group if bits[device] != majority]
        if odd:
            yield odd, [device for device in group if bits[device] == majority]


def heal(tree: PyTree) -> None:
    """Replaces copies that differ by that of the majority, in NNX objects; raises if there is none."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_branch)
    for node in nodes:
        for path, variable in nnx.iter_graph(node):
            if isinstance(variable, nnx.Variable):
                name = "".join(map(_attribute, path)).lstrip(".")
                raw = jax.tree.map(functools.partial(_healed, name), variable.get_raw_value())
                variable.set_raw_value(raw)


def _healed(name: str, value: Any) -> Any:
    if not isinstance(value, jax.Array):
        return value
    if is_key(value):
        return on_bits(functools.partial(_healed, name), value)
    layout = _copy_layout(value.sharding, value.shape)
    if layout is None:
        return value
    devices = list(layout.mesh.devices.flat)
    source = list(range(len(devices)))
    hashes = np.asarray(layout.hashes([(name, value)]))[:, 0]
    for odd, rest in _differing(layout.mesh, value, hashes):
        if len(rest) <= len(odd):
            lines = [f"{name}: {_names(odd)} unequal to {_names(rest)}, which are not the majority"]
            raise OutOfSyncError(_UNEQUAL.format(lines=listed(lines)))
        for device in odd:
            source[devices.index(device)] = devices.index(rest[0])
    if source == list(range(len(devices))):
        return value
    with outside_mesh():
        healed = _copy_program(layout.mesh)(layout.view(value), np.asarray(source))
    parts = [shard.data for shard in healed.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)


@functools.lru_cache(maxsize=16)
def _copy_program(mesh: Mesh) -> Callable[[jax.Array, Any], jax.Array]:
    """Returns a program in which device i gets the copy of device ``source[i]``."""

    def copy(local: jax.Array, source: jax.Array) -> jax.Array:
        copies = jax.lax.all_gather(local, mesh.axis_names)
        return jnp.asarray(copies[source[jax.lax.axis_index(mesh.axis_names)]])

    return _on_each_device(mesh, copy)


@functools.lru_cache(maxsize=16)
def _hash_program(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns a program that hashes on every device and gathers: shape (devices, leaves, 2)."""

    def hashes(arrays: list[jax.Array]) -> jax.Array:
        local = jnp.stack([bit_hash(array) for array in arrays])
        return jnp.asarray(jax.lax.all_gather(local, mesh.axis_names))

    return _on_each_device(mesh, hashes)


def _on_each_device(mesh: Mesh, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    # Outside shard_map XLA may use one copy of a replicated array on all devices.
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(mapped)


def _devices_by_part(array: jax.Array) -> list[list[jax.Device]]:
    groups: dict[Any, list[jax.Device]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        groups.setdefault(tuple((s.start, s.stop) for s in index), []).append(device)
    return [sorted(group, key=_by_id) for group in groups.values()]


def _names(devices: Sequence[jax.Device]) -> str:
    several = jax.process_count() > 1
    names = [
        f"{d.platform}:{d.id}" + (f" of process {d.process_index}" if several else "")
        for d in devices[:8]
    ]
    return ", ".join(names) + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")


# The finaliser of MurmurHash3 by Austin Appleby, in the public domain: every bit of a word affects
# every bit of the result, and different words have different results.
_STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_SEEDS = (0x9E3779B9, 0x7F4A7C15)
"""Two independent lanes of 32 bits, since JAX has no 64-bit integers by default."""


def bit_hash(array: jax.Array) -> jax.Array:
    """Hashes the bits of an array: 0.0 and -0.0 differ, and so do NaNs with different bits.

    A change of one element always changes the hash, since each is mixed with its position by a bijection
    before all are added; other changes are missed once in 2⁶⁴.
    """
    words = _words(array)
    position = jax.lax.iota(jnp.uint32, math.prod(words.shape)).reshape(words.shape)
    lanes = [_mixed(words ^ _mixed(position + np.uint32(seed))) for seed in _SEEDS]
    return jnp.stack([jnp.sum(lane, dtype=jnp.uint32) for lane in lanes])


def _mixed(word: jax.Array) -> jax.Array:
    for shift, factor in _STEPS:
        word = (word ^ (word >> shift)) * np.uint32(factor)
    return word ^ (word >> 16)


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits as uint32, one word or two for each element."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, np.bool_):
        return array.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([_words(jnp.real(array)), _words(jnp.imag(array))])
    info: Any = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    bits = info(dtype).bits  # not itemsize, which is one byte for 4-bit types
    if bits == 64:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)
