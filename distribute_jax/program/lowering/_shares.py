"""The shares of a sharded update: which state is divided among the replicas, and along which dim.

A leaf is divided along its largest dim that the number of replicas divides. One without such a dim stays
whole on each replica: padding it would change what an optax transformation sees of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import DATA, num_replicas, put
from distribute_jax._tree import is_given_away
from distribute_jax.program.binding._bind import Binding

LEAST_ELEMENTS = 1024
"""Smaller arrays stay whole: what they take is nothing beside the collectives that sharing them costs."""


def share_dim(shape: Sequence[int], replicas: int) -> int | None:
    """Gives the dim along which an array is divided; None where it stays whole."""
    fits = [dim for dim, size in enumerate(shape) if size and size % replicas == 0]
    if replicas == 1 or not fits or prod(shape) < LEAST_ELEMENTS:
        return None
    return max(fits, key=lambda dim: shape[dim])


def share_spec(dim: int | None) -> PartitionSpec:
    """Gives the placement of an array that is divided along a dim, or whole."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, DATA)


def share_sharding(value: Any, mesh: Mesh) -> NamedSharding | None:
    """Gives where the shares of an array lie; None where it stays whole."""
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    dim = share_dim(shape, num_replicas(mesh))
    return None if dim is None else NamedSharding(mesh, share_spec(dim))


def is_shared(variable: nnx.Variable[Any]) -> bool:
    """Tells whether the replicas share a variable: the state of an optimizer."""
    return isinstance(variable, nnx.OptState)


def divide_state(binding: Binding, mesh: Mesh) -> None:
    """Leaves each replica its share of the optimizer's state; nothing keeps the whole arrays."""
    shared = [variable for variable in binding.variables if is_shared(variable)]

    def divided(leaf: Any) -> Any:
        to = share_sharding(leaf, mesh)
        if to is None or is_given_away(leaf) or leaf.sharding.is_equivalent_to(to, leaf.ndim):
            return leaf
        return put(leaf, to)

    for variable, raw in zip(shared, read_raw(shared), strict=True):
        write_raw([variable], [jax.tree.map(divided, raw)])
