"""The components of an ON_READ variable, one for each replica; and scattered updates of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._checks import converting, refuse
from distribute_jax._errors import ArgumentError
from distribute_jax._jax_private import uncommitted
from distribute_jax._mesh import (
    DATA,
    cores_per_replica,
    local_copy_of_replicated,
    num_replicas,
    put,
    split_sharding,
)
from distribute_jax._messages import on_bits
from distribute_jax._values import Mirrored, PerReplica
from distribute_jax.variables._rules import VariableAggregation


def initial_components(
    value: jax.Array, replicas: int, aggregation: VariableAggregation
) -> jax.Array:
    """Stacks the first components: under SUM replica 0 has the value and the others 0."""
    if aggregation is VariableAggregation.SUM:
        nothing = jnp.zeros((replicas - 1, *value.shape), value.dtype)
        return jnp.concatenate([value[None], nothing])
    return jnp.broadcast_to(value, (replicas, *value.shape))


def divide(value: jax.Array, replicas: int, aggregation: VariableAggregation) -> jax.Array:
    """Stacks the components of a value assigned from outside.

    Under SUM each replica gets an equal share, and replica 0 the remainder, so that integers and
    floats, infinity included, read back exactly.
    """
    if aggregation is not VariableAggregation.SUM:
        return jnp.broadcast_to(value, (replicas, *value.shape))
    share = _share(value, replicas)
    first = value - share * (replicas - 1)
    others = jnp.broadcast_to(share, (replicas - 1, *value.shape))
    return jnp.concatenate([first[None], others])


def _share(value: jax.Array, replicas: int) -> jax.Array:
    """Returns about value / N, so that shares and remainder add up exactly, in any order.

    A float's is a multiple of its last digit, or 0 where there is none: then no partial sum is rounded.
    """
    if jnp.issubdtype(value.dtype, jnp.integer):
        return value // replicas
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return jnp.zeros_like(value)
    size = jnp.abs(value)
    digit = jnp.nextafter(size, jnp.full_like(size, jnp.inf)) - size
    finfo: Any = jnp.finfo
    has_digit = jnp.isfinite(digit) & (digit >= finfo(value.dtype).tiny)
    digit = jnp.where(has_digit, digit, 1)
    share = jnp.trunc(value / digit / replicas) * digit
    return jnp.where(has_digit, share, 0).astype(value.dtype)


def combine(stacked: jax.Array, aggregation: VariableAggregation, name: str) -> jax.Array:
    """Returns the value that the components of a variable read as."""
    if not isinstance(stacked, jax.core.Tracer) and not stacked.is_fully_addressable:
        # All processes read it together, and each gets a local copy of the result.
        return combine(uncommitted(local_copy_of_replicated(stacked)), aggregation, name)
    if stacked.shape[0] == 1:
        return stacked[0]
    if aggregation is VariableAggregation.SUM:
        return jnp.sum(stacked, 0, dtype=stacked.dtype)
    if aggregation is VariableAggregation.MEAN:
        return jnp.mean(stacked, 0)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return stacked[0]
    raise ArgumentError(
        f"The ON_READ variable {name!r} was read in cross-replica context, and has aggregation=NONE: "
        "nothing says how its replicas' values become one. Could not convert from "
        "`VariableAggregation.NONE`; make it with aggregation=dj.VariableAggregation.SUM, MEAN or "
        "ONLY_FIRST_REPLICA, or read its .values."
    )


def uncommitted_copy(value: jax.Array) -> jax.Array:
    """Returns the same numbers, or random keys, in an array that is not committed to a device."""
    return on_bits(lambda numbers: jnp.asarray(np.asarray(numbers)), value)


def from_result(raw: Any) -> Any:
    """Returns the components of a variable in the result of a step: what each replica returned."""
    if isinstance(raw, PerReplica):
        return raw.global_array
    if isinstance(raw, Mirrored):
        mesh = cast("Any", raw).sharding.mesh
        return place(jnp.stack([cast("Any", raw)] * num_replicas(mesh)), mesh)
    return raw


def first_replica(value: jax.Array) -> jax.Array:
    """Returns the value of replica 0 on every replica: numbers, bools or random keys."""

    def first(numbers: jax.Array) -> jax.Array:
        mine = jnp.where(jax.lax.axis_index(DATA) == 0, numbers, jnp.zeros_like(numbers))
        return jnp.asarray(jax.lax.psum(mine, DATA), numbers.dtype)

    return on_bits(first, value)


def cores_of(mirrored: jax.Array) -> int:
    """Returns how many devices hold one replica's copy of a mirrored value."""
    mesh = getattr(mirrored.sharding, "mesh", None)
    if isinstance(mesh, Mesh) and DATA in mesh.axis_names:
        return cores_per_replica(mesh)
    return 1


def place(stacked: Any, mesh: Mesh) -> Any:
    """Puts one component on each replica."""
    if isinstance(stacked, jax.core.Tracer):
        return stacked
    return put(stacked, split_sharding(mesh))


def mesh_of(stacked: Any) -> Mesh | None:
    """Returns the mesh with a component on each replica; None where the user's jit stored them elsewhere."""
    mesh = getattr(stacked.sharding, "mesh", None)
    if not isinstance(mesh, Mesh) or num_replicas(mesh) != stacked.shape[0]:
        return None
    return mesh if stacked.sharding.is_equivalent_to(split_sharding(mesh), stacked.ndim) else None


def reshard(stacked: jax.Array, mesh: Mesh, aggregation: VariableAggregation) -> jax.Array:
    """Returns the components for the replicas of a mesh, so that the variable reads the same."""
    if mesh_of(stacked) == mesh:
        return stacked
    replicas = num_replicas(mesh)
    if stacked.shape[0] != replicas:
        none = aggregation is VariableAggregation.NONE
        value = stacked[0] if none else combine(stacked, aggregation, "")
        stacked = initial_components(value, replicas, aggregation)
    components: jax.Array = place(stacked, mesh)
    return components


Combine = Callable[[jax.Array], jax.Array]

SCATTERS: dict[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "min",
    "max": "max", "update": "set",
}  # fmt: skip
"""The name of each operation in TensorFlow and in JAX."""


def check_rows(indices: Any, updates: jax.Array, shape: tuple[int, ...], method: str) -> jax.Array:
    """Returns the rows as an array of integers; those that are not traced must exist."""
    with converting(f"{method}: indices", indices, "integers along dim 0 of the variable"):
        rows = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if not shape or not jnp.issubdtype(rows.dtype, jnp.integer):
        refuse(f"{method}: indices", "integers along dim 0 of the variable", rows)
    wanted = (*rows.shape, *shape[1:])
    with converting(f"{method}: updates", updates, f"an array that broadcasts to {wanted}"):
        jax.eval_shape(lambda array: jnp.broadcast_to(array, wanted), updates)
    concrete = not isinstance(rows, jax.core.Tracer) and rows.size > 0
    if concrete and not -shape[0] <= int(np.min(rows)) <= int(np.max(rows)) < shape[0]:
        raise ArgumentError(
            f"{method} got indices from {int(np.min(rows))} to {int(np.max(rows))}, and the variable has "
            f"{shape[0]} rows, 0 to {shape[0] - 1}. JAX would leave such rows out silently."
        )
    return jnp.asarray(rows)


def scatter(
    value: jax.Array,
    op: str,
    indices: jax.Array,
    updates: jax.Array,
    combine_replicas: Combine | None,
) -> jax.Array:
    """Returns the value after the rows were changed; integers are divided toward zero.

    ``combine_replicas`` combines dense sums, or factors over the rows that any replica touches.
    """
    if combine_replicas is None:
        if op == "div":
            return _divided(value, jnp.ones_like(value).at[indices].multiply(updates))
        changed: jax.Array = getattr(value.at[indices], SCATTERS[op])(updates)
        return changed
    if op in ("add", "sub"):
        dense = combine_replicas(jnp.zeros_like(value).at[indices].add(updates))
        return value + dense if op == "add" else value - dense
    touched = jnp.zeros_like(value).at[indices].set(1)
    factor = jnp.where(touched > 0, jnp.ones_like(value).at[indices].multiply(updates), 0)
    factor = jnp.where(combine_replicas(touched) > 0, combine_replicas(factor), 1)
    return value * factor if op == "mul" else _divided(value, factor)


def _divided(value: jax.Array, by: jax.Array) -> jax.Array:
    return jax.lax.div(value, by.astype(value.dtype))
