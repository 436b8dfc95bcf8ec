"""Several reductions over the replicas at once, in one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from distribute_jax._mesh import mirrored_sharding, num_replicas, outside_mesh
from distribute_jax._tree import is_key
from distribute_jax._values import DistributedValues, Layout, PerReplica, UnevenPerReplica, reading
from distribute_jax.collectives._dtypes import check_summable
from distribute_jax.collectives._reduce_op import ReduceOp
from distribute_jax.strategies._cross_replica import (
    combined_replicas,
    note_combined,
    on_host_device,
    reduce_value,
)


def reduce_together(op: ReduceOp, values: list[Any], mesh: Mesh) -> list[Any]:
    """Does ``strategy.reduce`` with ``axis=None`` for each of several nests.

    Whole per-replica arrays, which is what gradients are, go through one program; others, such as
    batches with padding, each through its own.
    """
    leaves, treedef = jax.tree.flatten(values, is_leaf=_is_value)
    whole = [i for i, leaf in enumerate(leaves) if _is_whole(leaf, mesh)]
    results = [
        None if i in whole else reduce_value(op, leaf, None, mesh) for i, leaf in enumerate(leaves)
    ]
    parts = [leaves[i] for i in whole]
    if parts:
        named = (("the value", jax.ShapeDtypeStruct(p.part_shape, p.dtype)) for p in parts)
        check_summable(named, "strategy.reduce")
        for part in parts:
            note_combined(f"strategy.extended.batch_reduce_to({op.value!r})", part)
        program = _compiled(op, tuple(p.layout for p in parts), mesh)
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(reading(part))
            stack.enter_context(outside_mesh())
            for i, total in zip(whole, program([p.global_array for p in parts]), strict=True):
                results[i] = on_host_device(total)
    nests: list[Any] = jax.tree.unflatten(treedef, results)
    return nests


@functools.lru_cache(maxsize=256)
def _compiled(
    op: ReduceOp, layouts: tuple[Layout, ...], mesh: Mesh
) -> Callable[..., list[jax.Array]]:
    replicas = num_replicas(mesh)

    def combine(arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(arrays, layouts, strict=True)
        return [combined_replicas(op, array, layout, replicas) for array, layout in pairs]

    return jax.jit(combine, out_shardings=mirrored_sharding(mesh))


def _is_whole(leaf: Any, mesh: Mesh) -> bool:
    """Tells whether a value is one array with an equal part, all of it real, for each replica."""
    if not isinstance(leaf, PerReplica) or isinstance(leaf, UnevenPerReplica) or leaf.mesh != mesh:
        return False
    return leaf.counts is None and leaf.ambiguous is None and not is_key(leaf.global_array)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, (DistributedValues, nnx.Variable))
