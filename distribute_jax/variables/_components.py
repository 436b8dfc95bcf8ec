"""The components of an ON_READ variable, one for each replica; and scattered updates of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

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
from distribute_jax._values import Mirrored, PerReplica
from distribute_jax.variables._rules import VariableAggregation


def initial(value: jax.Array, replicas: int, aggregation: VariableAggregation) -> jax.Array:
    """Stacks the first components: under SUM replica 0 holds it all, so that it reads back."""
    if aggregation is VariableAggregation.SUM:
        nothing = jnp.zeros((replicas - 1, *value.shape), value.dtype)
        return jnp.concatenate([value[None], nothing])
    return jnp.broadcast_to(value, (replicas, *value.shape))


def divided(value: jax.Array, replicas: int, aggregation: VariableAggregation) -> jax.Array:
    """Stacks the components of a value assigned from outside.

    Under SUM each replica gets an equal share, and replica 0 what is left over, so that integers
    and floats, infinity included, read back as they were given.
    """
    if aggregation is not VariableAggregation.SUM:
        return jnp.broadcast_to(value, (replicas, *value.shape))
    share = _share(value, replicas)
    first = value - share * (replicas - 1)
    others = jnp.broadcast_to(share, (replicas - 1, *value.shape))
    return jnp.concatenate([first[None], others])


def _share(value: jax.Array, replicas: int) -> jax.Array:
    """Gives about value / N, so that shares and remainder add up exactly, in whatever order.

    For floats it is a multiple of the value's last digit: then no partial sum is rounded. Where
    there is no such digit, as in infinity and the smallest numbers, the share is zero.
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


def combined(stacked: jax.Array, aggregation: VariableAggregation, name: str) -> jax.Array:
    """Makes one value of the components; one alone is the value."""
    if not isinstance(stacked, jax.core.Tracer) and not stacked.is_fully_addressable:
        # All processes read it together, and each has then a number of its own.
        return combined(uncommitted(local_copy_of_replicated(stacked)), aggregation, name)
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


def made_anew(value: jax.Array) -> jax.Array:
    """Gives the same numbers, or random keys, in an array that no device was chosen for yet."""
    if _is_key(value):
        data = jnp.asarray(np.asarray(jax.random.key_data(value)))
        return _key_like(value, data)
    return jnp.asarray(np.asarray(value))


def returned(raw: Any) -> Any:
    """Gives the components that a variable in the result of a step has: what each replica returned."""
    if isinstance(raw, PerReplica):
        return raw.global_array
    if isinstance(raw, Mirrored):
        mesh = cast("Any", raw).sharding.mesh
        return placed(jnp.stack([cast("Any", raw)] * num_replicas(mesh)), mesh)
    return raw


def first_replica(value: jax.Array) -> jax.Array:
    """Gives every replica the value of replica 0: numbers, bools or random keys."""
    if _is_key(value):
        data = first_replica(jax.random.key_data(value))
        return _key_like(value, data)
    own = jnp.where(jax.lax.axis_index(DATA) == 0, value, jnp.zeros_like(value))
    return jnp.asarray(jax.lax.psum(own, DATA), value.dtype)


def _is_key(value: jax.Array) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def _key_like(key: jax.Array, data: jax.Array) -> jax.Array:
    new: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return new


def copies(mirrored: jax.Array) -> list[jax.Array]:
    """Gives the copies of a mirrored value: that of each replica of this process, on its first core."""
    return [shard.data for shard in mirrored.addressable_shards[:: _cores(mirrored)]]


def count_copies(mirrored: jax.Array) -> int:
    """Counts the replicas that hold a mirrored value."""
    return len(mirrored.sharding.device_set) // _cores(mirrored)


def _cores(mirrored: jax.Array) -> int:
    mesh = getattr(mirrored.sharding, "mesh", None)
    is_ours = isinstance(mesh, Mesh) and DATA in mesh.axis_names
    return cores_per_replica(cast("Mesh", mesh)) if is_ours else 1


def placed(stacked: Any, mesh: Mesh) -> Any:
    """Lays one component on each replica."""
    if isinstance(stacked, jax.core.Tracer):
        return stacked
    return put(stacked, split_sharding(mesh))


def mesh_of(stacked: Any) -> Mesh | None:
    """Gives the mesh on whose replicas the components lie; None where they lie elsewhere.

    A jit of the user's own leaves what it writes wherever XLA wants.
    """
    mesh = getattr(stacked.sharding, "mesh", None)
    if not isinstance(mesh, Mesh) or num_replicas(mesh) != stacked.shape[0]:
        return None
    return mesh if stacked.sharding.is_equivalent_to(split_sharding(mesh), stacked.ndim) else None


def relaid(stacked: jax.Array, mesh: Mesh, aggregation: VariableAggregation) -> jax.Array:
    """Lays the components on another number of replicas, so that the variable reads the same."""
    replicas, wanted = num_replicas(mesh), split_sharding(mesh)
    if stacked.shape[0] == replicas and stacked.sharding.is_equivalent_to(wanted, stacked.ndim):
        return stacked
    if stacked.shape[0] != replicas:
        kept = VariableAggregation.ONLY_FIRST_REPLICA
        none = aggregation is VariableAggregation.NONE
        value = combined(stacked, kept if none else aggregation, "")
        stacked = initial(value, replicas, aggregation)
    on_mesh: jax.Array = placed(stacked, mesh)
    return on_mesh


Combine = Callable[[jax.Array], jax.Array]

SCATTERS: dict[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "min",
    "max": "max", "update": "set",
}  # fmt: skip
"""Each operation, and what JAX calls it."""


def checked_rows(
    indices: Any, updates: jax.Array, shape: tuple[int, ...], method: str
) -> jax.Array:
    """Gives the rows as an array of integers, those of the host seen to be rows of the variable."""
    given = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if not shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ArgumentError(
            f"{method} got indices of dtype {given.dtype} for a variable of shape {shape}. They are "
            "integers, rows along its dim 0: jnp.array([0, 2])."
        )
    wanted = (*given.shape, *shape[1:])
    try:
        fits = jnp.broadcast_shapes(updates.shape, wanted) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise ArgumentError(
            f"{method} got updates of shape {updates.shape} for {given.size} rows of shape {shape[1:]}. Give "
            f"updates of shape {wanted}, or one that broadcasts to it."
        )
    concrete = not isinstance(given, jax.core.Tracer) and given.size > 0
    if concrete and not -shape[0] <= int(np.min(given)) <= int(np.max(given)) < shape[0]:
        raise ArgumentError(
            f"{method} got indices from {int(np.min(given))} to {int(np.max(given))}, and the variable has "
            f"{shape[0]} rows, 0 to {shape[0] - 1}. JAX would leave such rows out silently."
        )
    return jnp.asarray(given)


def scattered(
    value: jax.Array, op: str, indices: jax.Array, updates: jax.Array, over: Combine | None
) -> jax.Array:
    """Gives the value after the rows were changed.

    Args:
        value: the whole value.
        op: a key of ``SCATTERS``.
        indices: the rows.
        updates: what to add, multiply by, or put there.
        over: combines the replicas' changes, or None where there is one change only. Sums are taken
            over the dense changes; factors over the rows that any replica touches, where the
            factors that one replica gives for one row are multiplied first.

    Integers are divided toward zero.
    """
    if over is None:
        if op == "div":
            return _divided(value, jnp.ones_like(value).at[indices].multiply(updates))
        changed: jax.Array = getattr(value.at[indices], SCATTERS[op])(updates)
        return changed
    if op in ("add", "sub"):
        dense = over(jnp.zeros_like(value).at[indices].add(updates))
        return value + dense if op == "add" else value - dense
    own = jnp.zeros_like(value).at[indices].set(1)
    factor = over(jnp.where(own > 0, jnp.ones_like(value).at[indices].multiply(updates), 0))
    touched = over(own) > 0
    factor = jnp.where(touched, factor, 1)
    return value * factor if op == "mul" else _divided(value, factor)


def _divided(value: jax.Array, by: jax.Array) -> jax.Array:
    return jax.lax.div(value, by.astype(value.dtype))


class Scatters:
    """TensorFlow's name for each operation of ``scatter``."""

    @abstractmethod
    def scatter(self, op: str, indices: Any, updates: Any) -> Any:
        """Changes rows of the value."""

    def scatter_add(self, indices: Any, updates: Any) -> Any:
        """Adds to rows; see ``scatter``."""
        return self.scatter("add", indices, updates)

    def scatter_sub(self, indices: Any, updates: Any) -> Any:
        """Subtracts from rows; see ``scatter``."""
        return self.scatter("sub", indices, updates)

    def scatter_mul(self, indices: Any, updates: Any) -> Any:
        """Multiplies rows; see ``scatter``."""
        return self.scatter("mul", indices, updates)

    def scatter_div(self, indices: Any, updates: Any) -> Any:
        """Divides rows; see ``scatter``."""
        return self.scatter("div", indices, updates)

    def scatter_min(self, indices: Any, updates: Any) -> Any:
        """Lowers rows to the updates; see ``scatter``."""
        return self.scatter("min", indices, updates)

    def scatter_max(self, indices: Any, updates: Any) -> Any:
        """Raises rows to the updates; see ``scatter``."""
        return self.scatter("max", indices, updates)

    def scatter_update(self, indices: Any, updates: Any) -> Any:
        """Replaces rows; see ``scatter``."""
        return self.scatter("update", indices, updates)
