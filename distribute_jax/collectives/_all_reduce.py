"""All-reduce and gather of trees inside ``run``: dense arrays, packed small ones, and sparse ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import jax
import jax.numpy as jnp

from distribute_jax._checks import converting
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax._messages import PyTree, check_int_range, leaf_text, listed, on_bits, path_text
from distribute_jax.collectives._cross_device_ops import (
    CrossDeviceOps,
    NcclAllReduce,
    RingAllReduce,
    sum_by,
)
from distribute_jax.collectives._reduction import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
    as_dtype,
    check_summable,
    is_joinable,
    mean_accumulator,
    mean_dtype,
    sum_dtype,
)

_DEFAULT = NcclAllReduce()
_BY_IMPLEMENTATION: dict[CommunicationImplementation, CrossDeviceOps] = {
    CommunicationImplementation.RING: RingAllReduce(),
    CommunicationImplementation.NCCL: _DEFAULT,
}


def all_reduce(
    op: ReduceOp,
    tree: PyTree,
    replicas: int,
    *,
    bound: bool,
    ops: CrossDeviceOps | None = None,
    options: CommunicationOptions | None = None,
) -> PyTree:
    """Reduces each leaf over the replicas, if ``bound``: traced with the axis of the replicas."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    leaves = [leaf for _, leaf in paths]
    _check_leaves([(path_text(path), leaf) for path, leaf in paths])
    dense = [i for i, leaf in enumerate(leaves) if not is_sparse(leaf)]
    with converting("all_reduce: value", tree, "a tree of arrays of a dtype that JAX has"):
        arrays = [jnp.asarray(check_int_range(leaves[i], "all_reduce")) for i in dense]
    accumulator = mean_accumulator if op is ReduceOp.MEAN else sum_dtype
    sums = [as_dtype(array, accumulator(array.dtype)) for array in arrays]
    if bound:
        sums = _summed(sums, ops, options or CommunicationOptions())
    if op is ReduceOp.MEAN:
        sums = [
            as_dtype(total / replicas, mean_dtype(array.dtype))
            for total, array in zip(sums, arrays, strict=True)
        ]
    dense_sums = dict(zip(dense, sums, strict=True))
    results = [
        dense_sums[i] if i in dense_sums else all_reduce_sparse(op, leaf, replicas, bound=bound)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, results)


def _summed(
    arrays: Sequence[jax.Array], ops: CrossDeviceOps | None, options: CommunicationOptions
) -> list[jax.Array]:
    implementation = cast("CommunicationImplementation", options.implementation)
    ops = _BY_IMPLEMENTATION.get(implementation, ops or _DEFAULT)
    is_native = type(ops) is NcclAllReduce
    if is_native and ops.num_packs < 2 and not options.bytes_per_pack:
        return list(jax.lax.psum(list(arrays), DATA))
    psum = functools.partial(jax.lax.psum, axis_name=DATA)
    sum_array = psum if is_native else functools.partial(sum_by, ops)
    return sum_packed(
        arrays, sum_array, num_packs=ops.num_packs, bytes_per_pack=options.bytes_per_pack
    )


def all_gather(tree: PyTree, axis: int, *, bound: bool) -> PyTree:
    """Concatenates each leaf of all replicas along a dim, in replica order, if ``bound``."""
    _check_joinable(tree)

    def gather(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(check_int_range(leaf, "all_gather"))
        dim = checked_dim(leaf.ndim, axis, path_text(path), "all_gather")
        join = functools.partial(jax.lax.all_gather, axis_name=DATA, axis=dim, tiled=True)
        return on_bits(join, leaf) if bound else leaf

    return jax.tree_util.tree_map_with_path(gather, tree)


def checked_dim(ndim: int, axis: int, name: str, method: str) -> int:
    """Returns a non-negative axis; raises for a leaf that does not have it."""
    if ndim == 0:
        raise ArgumentError(
            f"{method}(axis={axis}): {name} has no dims to concatenate along. Add one first, for "
            "example with value[None] and axis=0."
        )
    if not -ndim <= axis < ndim:
        raise ArgumentError(f"{method}(axis={axis}): {name} has only {ndim} dims.")
    return axis % ndim


def _check_leaves(leaves: Sequence[tuple[str, Any]]) -> None:
    for name, leaf in leaves:
        if is_sparse(leaf) and not (type(leaf).__name__ == "BCOO" and leaf.n_batch == 0):
            raise ArgumentError(
                f"all_reduce: {name} is a sparse {type(leaf).__name__} of shape {leaf.shape}, and only a "
                "BCOO with n_batch=0 can be combined over the replicas. Pass value.todense() instead."
            )
    values = [(name, leaf.data if is_sparse(leaf) else leaf) for name, leaf in leaves]
    check_summable(values, "all_reduce")


def _check_joinable(tree: PyTree) -> None:
    bad = [
        f"{path_text(path)}: {leaf_text(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse)
        if is_sparse(leaf) or not is_joinable(leaf)
    ]
    if bad:
        raise ArgumentError(
            f"all_gather got leaves that cannot be concatenated:\n{listed(bad)}\nIt takes arrays of "
            "numbers, bools and random keys. Leave out other leaves, and convert a sparse array with "
            "value.todense()."
        )


def stacked_over_replicas(value: jax.Array) -> jax.Array:
    """Stacks the values of all replicas on a leading dim: numbers, bools or random keys."""
    return on_bits(lambda numbers: jnp.asarray(jax.lax.all_gather(numbers, DATA)), value)


SumArray = Callable[[jax.Array], jax.Array]
"""Sums one array over the replicas."""


def groups_by_size(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Groups consecutive arrays; a new group starts once the last one has more than ``limit`` bytes."""
    groups: list[list[int]] = []
    group_size = 0
    for i, size in enumerate(sizes):
        if not groups or group_size > limit > 0:
            groups.append([])
            group_size = 0
        groups[-1].append(i)
        group_size += size
    return groups


def split_points(size: int, pieces: int) -> list[int]:
    """Returns where to split a vector into pieces of about one size; the last takes the remainder."""
    piece = size // max(1, min(pieces, size))
    return [piece * i for i in range(1, min(pieces, size))]


def sum_packed(
    arrays: Sequence[jax.Array], sum_array: SumArray, *, num_packs: int, bytes_per_pack: int
) -> list[jax.Array]:
    """Sums arrays over the replicas, those of each dtype concatenated into packs."""
    results: dict[int, jax.Array] = {}
    by_dtype: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(i)
    for indices in by_dtype.values():
        of_dtype = [arrays[i] for i in indices]
        if bytes_per_pack:
            groups = groups_by_size([a.size * a.dtype.itemsize for a in of_dtype], bytes_per_pack)
            sums = [_sum_joined([of_dtype[i] for i in group], 1, sum_array) for group in groups]
            summed = [array for group in sums for array in group]
        elif num_packs:
            summed = _sum_joined(of_dtype, num_packs, sum_array)
        else:
            summed = [sum_array(array) for array in of_dtype]
        results.update(zip(indices, summed, strict=True))
    return [results[i] for i in range(len(arrays))]


def _sum_joined(arrays: Sequence[jax.Array], pieces: int, sum_array: SumArray) -> list[jax.Array]:
    vector = jnp.concatenate([array.ravel() for array in arrays])
    parts = jnp.split(vector, split_points(vector.size, pieces))
    total = jnp.concatenate([sum_array(part) for part in parts])
    vectors = jnp.split(total, list(accumulate(array.size for array in arrays))[:-1])
    return [v.reshape(array.shape) for v, array in zip(vectors, arrays, strict=True)]


def is_sparse(leaf: Any) -> bool:
    # Importing the module takes 0.3 s; a program that has such an array has imported it.
    module = sys.modules.get("jax.experimental.sparse")
    return module is not None and isinstance(leaf, module.JAXSparse)


def all_reduce_sparse(op: ReduceOp, leaf: Any, replicas: int, *, bound: bool) -> Any:
    """Concatenates the entries of all replicas; entries with equal indices add up when read."""
    data, indices = leaf.data, leaf.indices
    if op is ReduceOp.SUM:
        data = as_dtype(data, sum_dtype(data.dtype))
    else:
        dtype = mean_dtype(data.dtype)
        data = (data.astype(mean_accumulator(data.dtype)) / replicas).astype(dtype)
    if bound:
        data, indices = (jax.lax.all_gather(x, DATA, tiled=True) for x in (data, indices))
    return type(leaf)((data, indices), shape=leaf.shape)
