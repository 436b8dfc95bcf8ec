"""Packing: arrays of one dtype are sent as a few long vectors instead of many small arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp

SumArray = Callable[[jax.Array], jax.Array]
"""Adds one array over the replicas, element by element."""


def groups_by_size(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Forms packs of consecutive arrays.

    A new pack starts once the last one holds more than ``limit`` bytes, so packs err on the large
    side, and an array is never cut.

    Args:
        sizes: bytes of each array.
        limit: bytes after which a pack is closed; 0 means one pack.

    Returns:
        The positions of the arrays of each pack.
    """
    groups: list[list[int]] = []
    held = 0
    for i, size in enumerate(sizes):
        if not groups or held > limit > 0:
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += size
    return groups


def cuts(size: int, pieces: int) -> list[int]:
    """Gives where a vector is cut into about equal pieces; the last one takes the remainder."""
    piece = size // max(1, min(pieces, size))
    return [piece * i for i in range(1, min(pieces, size))]


def sum_packed(
    arrays: Sequence[jax.Array], sum_array: SumArray, *, num_packs: int, bytes_per_pack: int
) -> list[jax.Array]:
    """Adds arrays over the replicas, packed.

    Args:
        arrays: this replica's arrays, of any dtypes; a pack holds one dtype.
        sum_array: adds a single array.
        num_packs: vectors that each dtype is joined and cut into; 0 leaves each array as it is.
        bytes_per_pack: where it is not 0 it rules instead: packs of whole arrays.
    """
    results: dict[int, jax.Array] = {}
    for indices in _by_dtype(arrays):
        same = [arrays[i] for i in indices]
        if bytes_per_pack:
            groups = groups_by_size([a.size * a.dtype.itemsize for a in same], bytes_per_pack)
            sums = [_sum_joined([same[i] for i in group], 1, sum_array) for group in groups]
            summed = [array for group in sums for array in group]
        elif num_packs:
            summed = _sum_joined(same, num_packs, sum_array)
        else:
            summed = [sum_array(array) for array in same]
        results.update(zip(indices, summed, strict=True))
    return [results[i] for i in range(len(arrays))]


def _by_dtype(arrays: Sequence[jax.Array]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(i)
    return list(groups.values())


def _sum_joined(arrays: Sequence[jax.Array], pieces: int, sum_array: SumArray) -> list[jax.Array]:
    vector = jnp.concatenate([array.ravel() for array in arrays])
    parts = jnp.split(vector, cuts(vector.size, pieces))
    total = jnp.concatenate([sum_array(part) for part in parts])
    ends = list(accumulate(array.size for array in arrays))
    vectors = jnp.split(total, ends[:-1])
    return [v.reshape(array.shape) for v, array in zip(vectors, arrays, strict=True)]
