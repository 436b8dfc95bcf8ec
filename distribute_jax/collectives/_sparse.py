"""Sparse values: rows of an array by their indices, joined over the replicas rather than added."""

from __future__ import annotations

import sys
from typing import Any

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax.collectives._dtypes import as_dtype, mean_accumulator, mean_dtype, sum_dtype
from distribute_jax.collectives._reduce_op import ReduceOp

_MODULE = "jax.experimental.sparse"


def is_sparse(leaf: Any) -> bool:
    """Tells whether a leaf is a sparse array of JAX."""
    # Importing the module takes a third of a second, and who has such an array has imported it.
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(leaf, module.JAXSparse)


def check_sparse(leaf: Any, name: str, method: str) -> None:
    """Refuses a sparse array of another kind than a BCOO without batch dims."""
    if type(leaf).__name__ == "BCOO" and leaf.n_batch == 0 and is_sparse(leaf):
        return
    raise ArgumentError(
        f"{method}: {name} is a sparse {type(leaf).__name__} of shape {leaf.shape}, and only a BCOO with "
        "n_batch=0 can be combined over the replicas. Pass value.todense() instead."
    )


def all_reduce_sparse(op: ReduceOp, leaf: Any, replicas: int, *, bound: bool) -> Any:
    """Joins the entries of all replicas, in replica order; entries of one place add up when read."""
    data, indices = leaf.data, leaf.indices
    if op is ReduceOp.SUM:
        data = as_dtype(data, sum_dtype(data.dtype))
    else:
        dtype = mean_dtype(data.dtype)
        data = (data.astype(mean_accumulator(data.dtype)) / replicas).astype(dtype)
    if bound:
        data, indices = (jax.lax.all_gather(x, DATA, tiled=True) for x in (data, indices))
    return type(leaf)((data, indices), shape=leaf.shape)
