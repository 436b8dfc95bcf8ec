"""Rules of variables: synchronization, aggregation, casts of written values, components of ON_READ ones."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._checks import as_member, converting, refuse
from distribute_jax._errors import ArgumentError, PerReplicaError
from distribute_jax._jax_private import uncommitted
from distribute_jax._mesh import (
    DATA,
    cores_per_replica,
    local_copy_of_replicated,
    num_replicas,
    put,
    replicas_per_device,
    split_sharding,
)
from distribute_jax._messages import check_int_range, check_not_masked, on_bits
from distribute_jax._values import Mirrored, PerReplica
from distribute_jax.processes import current_job, naming_other_processes


class VariableSynchronization(enum.Enum):
    """When the replicas' values of a variable are combined.

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization
    """

    AUTO = "AUTO"
    """``ON_WRITE``."""
    NONE = "NONE"
    """Never: refused, since the replicas would diverge."""
    ON_WRITE = "ON_WRITE"
    """At every write: the variable is mirrored."""
    ON_READ = "ON_READ"
    """When it is read outside of ``run``; each replica has a local value."""


class VariableAggregation(enum.Enum):
    """How the replicas' values are combined.

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableAggregation
    """

    NONE = "NONE"
    """Not at all: the replicas must write the same value, which is proved."""
    SUM = "SUM"
    """Their sum."""
    MEAN = "MEAN"
    """Their mean."""
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
    """The value of replica 0."""


def check_kinds(
    synchronization: Any, aggregation: Any, dtype: Any
) -> tuple[VariableSynchronization, VariableAggregation]:
    """Returns the members for the arguments of a variable, with ON_WRITE for AUTO; raises if invalid."""
    synchronization = as_member(
        "dj.Variable: synchronization", synchronization, VariableSynchronization
    )
    aggregation = as_member("dj.Variable: aggregation", aggregation, VariableAggregation)
    if synchronization is VariableSynchronization.NONE:
        raise ArgumentError(
            "dj.Variable: synchronization=NONE is invalid, since the replicas would diverge. Use ON_WRITE, "
            "or ON_READ, with which each replica keeps a local value."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise ArgumentError(
            f"dj.Variable: aggregation=MEAN needs a floating dtype, since the mean of integers is not an "
            f"integer; got {dtype}. Use SUM or ONLY_FIRST_REPLICA."
        )
    if aggregation is VariableAggregation.SUM and dtype == jnp.bool_:
        raise ArgumentError(
            "dj.Variable: aggregation=SUM needs a numeric dtype; got bool. Use ONLY_FIRST_REPLICA, or count: "
            "dj.Variable(0, aggregation=dj.VariableAggregation.SUM)."
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Kinds of numbers, each of which can be converted to the later ones, but not to the earlier ones."""


def cast(value: Any, dtype: Any, name: str) -> jax.Array:
    """Converts a value to a variable's dtype; raises for 0.5 in an int or 300 in a uint8.

    Floats are rounded to shorter ones, as everywhere in JAX.
    """
    check_not_masked(value, f"Variable {name!r}")
    with converting(f"Variable {name!r}: value", value):
        is_jax = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
        # NumPy can represent a large Python integer; JAX would refuse or wrap it.
        array: Any = jnp.asarray(value) if is_jax else np.asarray(value)
    if array.dtype != dtype and not _can_hold(dtype, array):
        raise ArgumentError(
            f"Variable {name!r} has dtype {dtype} and was given {array.dtype}"
            f"{'' if isinstance(array, jax.core.Tracer) else f' {array!s:.60}'}, which would be changed "
            "silently. Use a variable of a dtype for such numbers, such as dj.Variable(0.0) for floats, "
            f"or convert them: jnp.round(value).astype({str(dtype)!r})."
        )
    return jnp.asarray(array, dtype)


def initial_array(value: Any, name: str) -> jax.Array:
    """Returns the initial value of a variable as an array; raises if it is not a number or an array."""
    array: Any = check_int_range(value, f"dj.Variable {name!r}")
    if isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
        return jnp.asarray(array)
    leaves = jax.tree.leaves(array, is_leaf=lambda leaf: leaf is None)
    wrong = any(leaf is None or isinstance(leaf, str) for leaf in leaves)
    if isinstance(array, dict) or not leaves or wrong:
        refuse(f"dj.Variable {name!r}: value", "a number or an array", value)
    with converting(f"dj.Variable {name!r}: value", value):
        return jnp.asarray(array)


def _can_hold(dtype: Any, array: Any) -> bool:
    kind, wanted = _kind(array.dtype), _kind(dtype)
    if kind != wanted:
        return 0 <= kind < wanted
    if not jnp.issubdtype(dtype, jnp.integer):
        return True
    info: Any = jnp.iinfo
    low, high = info(dtype).min, info(dtype).max
    if low <= info(array.dtype).min and info(array.dtype).max <= high:
        return True
    if isinstance(array, jax.core.Tracer):
        return False
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return False
    numbers = np.asarray(array)
    return numbers.size == 0 or (low <= int(numbers.min()) and int(numbers.max()) <= high)


def _kind(dtype: Any) -> int:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


def per_replica_error(name: str) -> PerReplicaError:
    """Returns the error for a per-replica value that is written outside of ``run``."""
    return PerReplicaError(
        f"Variable {name!r} was given a per-replica value in cross-replica context; its replicas would "
        "diverge. Reduce it first: v.assign(strategy.reduce('mean', value)), or assign inside run."
    )


_created: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("created", default=None)


@contextmanager
def record_created() -> Iterator[list[tuple[Any, Any]]]:
    """Yields a list of the variables created in a trace within the block, with their initial raw values."""
    created: list[tuple[Any, Any]] = []
    token = _created.set(created)
    try:
        yield created
    finally:
        _created.reset(token)


def note_created(variable: Any, raw: Any) -> None:
    """Adds a variable that is being created in a trace to the innermost list."""
    if (created := _created.get()) is not None:
        created.append((variable, raw))


def initial_components(
    value: jax.Array, replicas: int, aggregation: VariableAggregation
) -> jax.Array:
    """Returns the stacked initial components: under SUM the value on replica 0 and 0 on the others."""
    if aggregation is VariableAggregation.SUM:
        zeros = jnp.zeros((replicas - 1, *value.shape), value.dtype)
        return jnp.concatenate([value[None], zeros])
    return jnp.broadcast_to(value, (replicas, *value.shape))


def divide(value: jax.Array, replicas: int, aggregation: VariableAggregation) -> jax.Array:
    """Returns the stacked components of a value assigned from outside.

    Under SUM each replica gets an equal share, and replica 0 the remainder, so that integers and
    floats, infinity included, read back exactly.
    """
    if aggregation is not VariableAggregation.SUM:
        return jnp.broadcast_to(value, (replicas, *value.shape))
    share = _share(value, replicas)
    first = value - share * (replicas - 1)
    return jnp.concatenate([first[None], jnp.broadcast_to(share, (replicas - 1, *value.shape))])


def _share(value: jax.Array, replicas: int) -> jax.Array:
    """Returns about value / replicas, such that shares and remainder add up exactly, in any order.

    The share of a float is a multiple of the unit in its last place (ulp), so that no partial sum is
    rounded; or 0 if the ulp is subnormal or not finite.
    """
    if jnp.issubdtype(value.dtype, jnp.integer):
        return value // replicas
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return jnp.zeros_like(value)
    magnitude = jnp.abs(value)
    ulp = jnp.nextafter(magnitude, jnp.full_like(magnitude, jnp.inf)) - magnitude
    finfo: Any = jnp.finfo
    has_ulp = jnp.isfinite(ulp) & (ulp >= finfo(value.dtype).tiny)
    ulp = jnp.where(has_ulp, ulp, 1)
    return jnp.where(has_ulp, jnp.trunc(value / ulp / replicas) * ulp, 0).astype(value.dtype)


def combine(stacked: jax.Array, aggregation: VariableAggregation, name: str) -> jax.Array:
    """Returns the aggregate of the stacked components of a variable."""
    is_array = isinstance(stacked, jax.Array) and not isinstance(stacked, jax.core.Tracer)
    if is_array and not stacked.is_fully_addressable:
        # All processes read it together, and each gets a local copy.
        what = f"reading the ON_READ variable {name!r}"
        current_job().actions.record(what)
        with naming_other_processes(what, is_alone=False):
            local = uncommitted(local_copy_of_replicated(stacked))
        return combine(local, aggregation, name)
    if stacked.shape[0] == 1:
        return stacked[0]
    if aggregation is VariableAggregation.SUM:
        return jnp.sum(stacked, 0, dtype=stacked.dtype)
    if aggregation is VariableAggregation.MEAN:
        return jnp.mean(stacked, 0)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return stacked[0]
    raise ArgumentError(
        f"The ON_READ variable {name!r} was read in cross-replica context, and has aggregation=NONE: it "
        "is not defined how its components become one value. Could not convert from "
        "`VariableAggregation.NONE`; create it with aggregation=dj.VariableAggregation.SUM, MEAN or "
        "ONLY_FIRST_REPLICA, or read its .values."
    )


def uncommitted_copy(value: jax.Array) -> jax.Array:
    """Returns a copy of an array of numbers or random keys that is not committed to a device."""
    return on_bits(lambda numbers: jnp.asarray(np.asarray(numbers)), value)


def from_result(raw: Any) -> Any:
    """Returns the stacked components of a variable that a step returned."""
    if isinstance(raw, PerReplica):
        return raw.global_array
    if isinstance(raw, Mirrored):
        array: Any = raw
        mesh = array.sharding.mesh
        return place(jnp.stack([array] * num_replicas(mesh)), mesh)
    return raw


def first_replica(value: jax.Array) -> jax.Array:
    """Broadcasts the value of replica 0: numbers, bools or random keys."""

    def first(numbers: jax.Array) -> jax.Array:
        local = jnp.where(jax.lax.axis_index(DATA) == 0, numbers, jnp.zeros_like(numbers))
        return jnp.asarray(jax.lax.psum(local, DATA), numbers.dtype)

    return on_bits(first, value)


def devices_and_replicas(mirrored: jax.Array) -> tuple[int, int]:
    """Returns on how many devices each replica has a mirrored value, and how many replicas share one."""
    mesh = getattr(mirrored.sharding, "mesh", None)
    if isinstance(mesh, Mesh) and DATA in mesh.axis_names:
        return cores_per_replica(mesh), replicas_per_device(mesh)
    return 1, 1


def place(stacked: Any, mesh: Mesh) -> Any:
    """Places stacked components, one on each replica."""
    if isinstance(stacked, jax.core.Tracer):
        return stacked
    return put(stacked, split_sharding(mesh))


def mesh_of(stacked: Any) -> Mesh | None:
    """Returns the mesh with one component on each replica; None if the user's jit placed them otherwise."""
    mesh = getattr(stacked.sharding, "mesh", None)
    if not isinstance(mesh, Mesh) or num_replicas(mesh) != stacked.shape[0]:
        return None
    return mesh if stacked.sharding.is_equivalent_to(split_sharding(mesh), stacked.ndim) else None


def reshard(stacked: jax.Array, mesh: Mesh, aggregation: VariableAggregation) -> jax.Array:
    """Returns components with the same aggregate for the replicas of another mesh."""
    if mesh_of(stacked) == mesh:
        return stacked
    replicas = num_replicas(mesh)
    if stacked.shape[0] != replicas:
        none = aggregation is VariableAggregation.NONE
        value = stacked[0] if none else combine(stacked, aggregation, "")
        stacked = initial_components(value, replicas, aggregation)
    return place(stacked, mesh)


Combine = Callable[[jax.Array], jax.Array]

SCATTERS: dict[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "min",
    "max": "max", "update": "set",
}  # fmt: skip
"""Names of scatter operations in TensorFlow, and the methods of ``array.at`` in JAX."""


def check_rows(indices: Any, updates: jax.Array, shape: tuple[int, ...], method: str) -> jax.Array:
    """Returns row indices as an array of integers; raises if indices that are not traced do not exist."""
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
            f"{shape[0]} rows, 0 to {shape[0] - 1}. JAX would silently ignore such rows."
        )
    return jnp.asarray(rows)


def scatter(
    value: jax.Array,
    op: str,
    indices: jax.Array,
    updates: jax.Array,
    combine_replicas: Combine | None,
) -> jax.Array:
    """Returns the value with some rows changed; integers are divided toward zero.

    ``combine_replicas`` combines the replicas' dense sums, or their factors for the rows that any of
    them changes.
    """
    if combine_replicas is None:
        if op == "div":
            return _divided(value, jnp.ones_like(value).at[indices].multiply(updates))
        return getattr(value.at[indices], SCATTERS[op])(updates)
    if op in ("add", "sub"):
        dense = combine_replicas(jnp.zeros_like(value).at[indices].add(updates))
        return value + dense if op == "add" else value - dense
    touched = jnp.zeros_like(value).at[indices].set(1)
    factor = jnp.where(touched > 0, jnp.ones_like(value).at[indices].multiply(updates), 0)
    factor = jnp.where(combine_replicas(touched) > 0, combine_replicas(factor), 1)
    return value * factor if op == "mul" else _divided(value, factor)


def _divided(value: jax.Array, by: jax.Array) -> jax.Array:
    return jax.lax.div(value, by.astype(value.dtype))
