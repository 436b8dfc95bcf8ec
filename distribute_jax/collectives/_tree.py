"""Collectives on whole trees, inside ``run``: one call for many leaves of any dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax._tree import leaf_text, listed, path_text
from distribute_jax._typing import PyTree
from distribute_jax.collectives._reduce_op import ReduceOp


def all_reduce(op: ReduceOp, tree: PyTree, replicas: int, *, bound: bool) -> PyTree:
    """Combines each leaf over the replicas; every replica gets the result.

    Args:
        op: SUM or MEAN; a mean of integers is floating.
        tree: a nest of arrays (each replica's view).
        replicas: the number of replicas.
        bound: whether the replica axis is bound; without it there is one replica.
    """
    _check_leaves(tree, "all_reduce")
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [_as_mean(leaf) if op is ReduceOp.MEAN else jnp.asarray(leaf) for leaf in leaves]
    if bound:
        leaves = jax.lax.psum(leaves, DATA)
    if op is ReduceOp.MEAN:
        leaves = [leaf / replicas for leaf in leaves]
    return jax.tree.unflatten(treedef, leaves)


def all_gather(tree: PyTree, axis: int, *, bound: bool) -> PyTree:
    """Joins each leaf of all replicas along a dim, in replica order; every replica gets it."""
    _check_leaves(tree, "all_gather")

    def gather(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        dim = checked_dim(leaf.ndim, axis, path_text(path), "all_gather")
        return jnp.asarray(jax.lax.all_gather(leaf, DATA, axis=dim, tiled=True)) if bound else leaf

    return jax.tree_util.tree_map_with_path(gather, tree)


def checked_dim(ndim: int, axis: int, name: str, method: str) -> int:
    """Turns a maybe negative axis into a dim, or raises for a leaf that does not have it."""
    if ndim == 0:
        raise ArgumentError(
            f"{method}(axis={axis}): {name} has no dims to join along. Give it one first, for "
            "example with value[None] and axis=0."
        )
    if not -ndim <= axis < ndim:
        raise ArgumentError(f"{method}(axis={axis}): {name} has only {ndim} dims.")
    return axis % ndim


def _as_mean(leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    exact = jnp.issubdtype(array.dtype, jnp.integer)
    return array.astype(jnp.result_type(float)) if exact else array


def _check_leaves(tree: PyTree, method: str) -> None:
    bad = [
        f"{path_text(path)}: {leaf_text(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not _is_numeric(leaf)
    ]
    if bad:
        raise ArgumentError(
            f"{method} got leaves that cannot be combined over the replicas:\n{listed(bad)}\n"
            "It takes floating, complex and integer arrays. Convert a bool with "
            "value.astype(jnp.int32), and leave other leaves out."
        )


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, (bool, str, bytes)):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (int, float, complex))
    return bool(jnp.issubdtype(dtype, jnp.number))
