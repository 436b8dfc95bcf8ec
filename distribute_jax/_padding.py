"""Padding of partial batches: short shares repeat real rows.

They are not filled with zeros, of which a step can make NaNs (by a division or a logarithm), and a NaN
survives the mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import (
    num_replicas,
    outside_mesh,
    replicas_per_device,
    split_sharding,
    wait_on_cpu,
)
from distribute_jax._messages import leaf_text, listed
from distribute_jax._values import Layout, PerReplica


def padded_rows(counts: Sequence[int], share: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Returns the index of the real row in each of the ``share`` rows of each replica.

    The replicas have ``counts`` real rows, one replica after the other. A short share repeats its last
    row, and an empty one the last row of the replica before it.
    """
    ends = np.cumsum(counts)
    last = np.maximum(ends - 1, 0)
    rows = (ends - counts)[:, None] + np.arange(share)
    return np.asarray(np.minimum(rows, last[:, None]).ravel(), dtype=np.intp)


def is_real(counts: Sequence[int], share: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns the mask of real rows, in replica order."""
    return (np.arange(share) < np.asarray(counts)[:, None]).ravel()


def uneven_to_joined(parts: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Joins one array for each replica, which may differ in their number of rows, into one batch.

    Every part is padded to the longest with its last row, an empty one with a row of another part.
    Parts that are on the right device stay there.
    """
    _check_parts(parts, mesh)
    counts = tuple(int(part.shape[0]) for part in parts)
    share, rest = max(counts), parts[0].shape[1:]
    sharding = split_sharding(mesh)
    shape = (share * len(parts), *rest)
    if share == 0:
        return PerReplica(
            jax.device_put(jnp.asarray(parts[0]), sharding), mesh, layout=Layout.JOINED
        )
    padded = _padded_parts(parts, counts, share)
    each = replicas_per_device(mesh)
    placed = [
        _joined(padded[(index[0].start or 0) // share :][:each], device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    ]
    array = jax.make_array_from_single_device_arrays(shape, sharding, placed)
    real = None if set(counts) == {share} else counts
    return PerReplica(array, mesh, layout=Layout.JOINED, counts=real)


def _joined(parts: Sequence[Any], device: jax.Device) -> jax.Array:
    placed = jax.device_put(list(parts), device)
    with outside_mesh():
        return placed[0] if len(placed) == 1 else jnp.concatenate(placed)


def _padded_parts(parts: Sequence[Any], counts: Sequence[int], share: int) -> list[Any]:
    rows = padded_rows(counts, share).reshape(len(parts), share)
    owners = np.searchsorted(np.cumsum(counts), rows[:, 0], side="right")
    first = np.cumsum(counts) - counts
    with outside_mesh():
        return [
            part if count == share else parts[owner][rows[i] - first[owner]]
            for i, (part, count, owner) in enumerate(zip(parts, counts, owners, strict=True))
        ]


def _check_parts(parts: Sequence[Any], mesh: Mesh) -> None:
    kinds = {(part.shape[1:], part.dtype) if part.ndim else None for part in parts}
    if len(parts) == num_replicas(mesh) and len(kinds) == 1 and None not in kinds:
        return
    lines = [f"replica {i}: {leaf_text(part)}" for i, part in enumerate(parts)]
    raise ArgumentError(
        f"A per-replica value on {num_replicas(mesh)} replicas is made of {len(parts)} parts that "
        f"do not make one batch:\n{listed(lines)}\n"
        "There must be one array for each replica, and only dim 0, the number of examples, may "
        "differ. Give every part the same dtype and the same other dims, for example with "
        "np.stack, or pad them before strategy.experimental_distribute_values_from_function."
    )


def rows_to_joined(value: PerReplica) -> PerReplica:
    """Turns the stacked rows that a step returned for a partial batch into a batch."""
    with outside_mesh():
        array = _joiner(value.mesh)(value.global_array)
    return PerReplica(array, value.mesh, layout=Layout.JOINED, counts=value.counts)


@functools.lru_cache(maxsize=16)
def _joiner(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    def join(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])

    return jax.jit(join, out_shardings=split_sharding(mesh))


def with_rows(value: PerReplica, rows: Sequence[int], counts: tuple[int, ...] | None) -> PerReplica:
    """Returns a batch of these rows of each replica's share, of which ``counts`` are real."""
    with outside_mesh():
        array = wait_on_cpu(_selector(value.mesh)(value.global_array, np.asarray(rows)))
    return PerReplica(array, value.mesh, layout=Layout.JOINED, counts=counts)


def with_all_rows(value: PerReplica) -> PerReplica:
    """Returns a batch whose padding is, on each replica, all real rows of the others."""
    counts = value.counts or ()
    real = np.flatnonzero(is_real(counts, value.part_shape[0]))
    real = real.repeat(2) if len(real) == 1 else real  # of one row JAX traces another program
    own_first = [np.roll(real, -start) for start in np.cumsum(counts) - counts]
    with outside_mesh():
        array = wait_on_cpu(_taker(value.mesh)(value.global_array, np.concatenate(own_first)))
    return PerReplica(array, value.mesh, layout=Layout.JOINED, counts=counts)


@functools.lru_cache(maxsize=16)
def _taker(mesh: Mesh) -> Callable[[jax.Array, Any], jax.Array]:
    return jax.jit(lambda array, rows: array[rows], out_shardings=split_sharding(mesh))


@functools.lru_cache(maxsize=16)
def _selector(mesh: Mesh) -> Callable[[jax.Array, Any], jax.Array]:
    def select(array: jax.Array, rows: jax.Array) -> jax.Array:
        replicas, (size, *rest) = num_replicas(mesh), array.shape
        shares = array.reshape(replicas, size // replicas, *rest)
        return shares[:, rows].reshape(replicas * len(rows), *rest)

    return jax.jit(select, out_shardings=split_sharding(mesh))


def other_paddings(values: Sequence[PerReplica]) -> Iterator[list[PerReplica]]:
    """Yields the same batch twice, with other rows in its padding; real rows are untouched.

    If this changes a step's results, padding leaks. All padding becomes one real example, the same in each
    leaf: the first, then the last, so that also results that depend on how often a row occurs change. If
    all examples are equal, floats are halved, integers become 0 or 1, and bools flip. No value becomes NaN
    or leaves the range of the data and {0, 0.5, 1}. Leaves with the same ``counts`` and share are changed
    together; those without padding stay as they are.
    """
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if value.counts is not None:
            groups.setdefault((value.mesh, value.counts, value.part_shape[0]), []).append(i)
    for which in (0, -1):
        changed = list(values)
        for (mesh, counts, share), places in groups.items():
            rows, real = _one_row(counts, share, which), is_real(counts, share)
            parts = [values[i].global_array for i in places]
            arrays = wait_on_cpu(_replacer(mesh)(parts, rows, real))
            for i, array in zip(places, arrays, strict=True):
                changed[i] = PerReplica(array, mesh, layout=values[i].layout, counts=counts)
        yield changed


def _one_row(counts: Sequence[int], share: int, which: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the row that replaces each row: itself, or one real row for padding."""
    real = is_real(counts, share)
    rows = np.arange(len(real), dtype=np.int32)
    rows[~real] = np.flatnonzero(real)[which]
    return rows


@functools.lru_cache(maxsize=16)
def _replacer(mesh: Mesh) -> Callable[..., list[jax.Array]]:
    def replace(arrays: list[jax.Array], rows: jax.Array, real: jax.Array) -> list[jax.Array]:
        others = [array[rows] for array in arrays]
        unchanged = jnp.stack([(a == b).all() for a, b in zip(arrays, others, strict=True)]).all()
        return [
            jnp.where(
                real.reshape(-1, *[1] * (array.ndim - 1)),
                array,
                jnp.where(unchanged, _another_value(array), other),
            )
            for array, other in zip(arrays, others, strict=True)
        ]

    return jax.jit(replace, out_shardings=split_sharding(mesh))


def _another_value(array: jax.Array) -> jax.Array:
    if array.dtype == bool:
        return ~array
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.where(array == 0, 1, 0).astype(array.dtype)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        usable = jnp.isfinite(array) & (array != 0)
        return jnp.where(usable, array * 0.5, 0.5).astype(array.dtype)
    return array


def align(
    caller: str, what: str, array: jax.Array, values: str, shape: tuple[int, ...]
) -> jax.Array:
    """Returns a mask or weights with as many dims as values have, aligned from the left.

    One surplus last dim of size 1 is dropped, as in Keras.
    """
    weights = array
    if array.ndim == len(shape) + 1 and array.shape[-1] == 1:
        weights = array[..., 0]
    fits = all(n in (1, size) for n, size in zip(weights.shape, shape, strict=False))
    if weights.ndim > len(shape) or not fits:
        raise ArgumentError(
            f"{caller} got {what} of shape {array.shape} for {values} of shape {shape}. Its dims are "
            "matched with those from the left: pass one number for each example, shape (batch,), or one "
            "for each value."
        )
    return weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim))


def real_mask(caller: str, values: str, shape: tuple[int, ...], replica: Any) -> jax.Array | None:
    """Returns the mask of rows that are not padding, with as many dims as values; None without padding."""
    if replica is None or not replica.is_padded or not shape:
        return None
    mask: jax.Array = replica.batch_mask
    if shape[0] != mask.shape[0]:
        raise ArgumentError(
            f"{caller} got {values} with {shape[0]} rows for a replica's share of {mask.shape[0]} examples, "
            "so it cannot tell which belong to the padding of this partial batch. Give it one row for each "
            "example: keep the batch as dim 0 and do not flatten it."
        )
    return mask.reshape(-1, *(1,) * (len(shape) - 1))
