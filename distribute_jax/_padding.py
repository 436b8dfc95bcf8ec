"""Padding: shares of unequal length become equal by repeating real rows, never by zeros.

Zeros can turn into NaNs in a step (a division, a logarithm), and a NaN survives the mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import num_replicas, split_sharding
from distribute_jax._tree import leaf_text, listed
from distribute_jax._values import Layout, PerReplica


def padded_rows(counts: Sequence[int], share: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Says which real row fills each row of the padded shares.

    Args:
        counts: the number of real rows of each replica; the rows lie one replica after the other.
        share: the rows of one replica after padding.

    Returns:
        Indices of real rows, ``len(counts) * share`` of them in replica order. A short share
        repeats its own last row, and an empty one the last row of the replica before it.
    """
    ends = np.cumsum(counts)
    last = np.maximum(ends - 1, 0)
    rows = (ends - counts)[:, None] + np.arange(share)
    return np.asarray(np.minimum(rows, last[:, None]).ravel(), dtype=np.intp)


def is_real(counts: Sequence[int], share: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks the real rows among the padded ones, in replica order."""
    return (np.arange(share) < np.asarray(counts)[:, None]).ravel()


def uneven_to_joined(parts: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Makes one batch of arrays, one for each replica, that differ only in their number of rows.

    Every part is padded to the longest with its own last row, an empty one with a row of another
    part. What lies on the right device stays there.

    Args:
        parts: an array for each replica, in replica order (per-replica view).
        mesh: the mesh whose axis ``"data"`` they lie along.

    Returns:
        A joined value; ``counts`` are the parts' lengths, or None where all are equal.

    Raises:
        ArgumentError: the parts differ in more than dim 0, have no dims, or are not N.
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
    placed = [
        jax.device_put(padded[(index[0].start or 0) // share], device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    ]
    array = jax.make_array_from_single_device_arrays(shape, sharding, placed)
    real = None if set(counts) == {share} else counts
    return PerReplica(array, mesh, layout=Layout.JOINED, counts=real)


def _padded_parts(parts: Sequence[Any], counts: Sequence[int], share: int) -> list[Any]:
    rows = padded_rows(counts, share).reshape(len(parts), share)
    owners = np.searchsorted(np.cumsum(counts), rows[:, 0], side="right")
    first = np.cumsum(counts) - counts
    # Inside scope() the mesh context would refuse any computation on one device.
    with jax.set_mesh(None):
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


def other_padding(values: Sequence[PerReplica]) -> list[PerReplica]:
    """Gives the same batch with other rows in its padding; real rows are not touched.

    A step whose result changes with this lets padding leak. Every padded row changes wherever its
    dtype has another value: it becomes another real example, the same one in each leaf, and where
    that is equal to what was there, floats are halved, integers become 0 or 1, and bools flip. No
    value becomes NaN or leaves the range of the data and {0, 0.5, 1}. The same call gives the same
    rows.

    Args:
        values: the leaves of a batch (global view), joined; leaves with the same ``counts`` and
            share stay together.

    Returns:
        The leaves in the same order with the same shardings; those without padding as they are.
    """
    changed = list(values)
    alike: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if value.counts is not None:
            alike.setdefault((value.mesh, value.counts, value.part_shape[0]), []).append(i)
    for (mesh, counts, share), places in alike.items():
        rows, real = _other_rows(counts, share), is_real(counts, share)
        arrays = _replacer(mesh)([values[i].global_array for i in places], rows, real)
        for i, array in zip(places, arrays, strict=True):
            changed[i] = PerReplica(array, mesh, layout=values[i].layout, counts=counts)
    return changed


def _other_rows(counts: Sequence[int], share: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Says which row of the padded batch replaces each row: a real one for padding, else itself."""
    real = is_real(counts, share)
    places = np.flatnonzero(real)
    now = padded_rows(counts, share)[~real]
    # Each padded row takes a real row further away, never the one that it holds now.
    steps = 1 + np.arange(len(now)) % max(len(places) - 1, 1)
    rows = np.arange(len(real), dtype=np.int32)
    rows[~real] = places[(now + steps) % len(places)]
    return rows


@functools.lru_cache(maxsize=16)
def _replacer(mesh: Mesh) -> Callable[..., list[jax.Array]]:
    def replace(arrays: list[jax.Array], rows: jax.Array, real: jax.Array) -> list[jax.Array]:
        return [_replaced(array, rows, real) for array in arrays]

    return jax.jit(replace, out_shardings=split_sharding(mesh))


def _replaced(array: jax.Array, rows: jax.Array, real: jax.Array) -> jax.Array:
    def along_rows(flags: jax.Array) -> jax.Array:
        return flags.reshape(-1, *[1] * (array.ndim - 1))

    other = array[rows]
    same = (other == array).all(axis=tuple(range(1, array.ndim)))
    other = jnp.where(along_rows(same), _another_value(array), other)
    return jnp.where(along_rows(real), array, other)


def _another_value(array: jax.Array) -> jax.Array:
    if array.dtype == bool:
        return ~array
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.where(array == 0, 1, 0).astype(array.dtype)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        usable = jnp.isfinite(array) & (array != 0)
        return jnp.where(usable, array * 0.5, 0.5).astype(array.dtype)
    return array
