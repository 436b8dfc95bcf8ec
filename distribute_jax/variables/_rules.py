"""Rules of variables: synchronization and aggregation, casts of written values, creation in a trace."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._checks import as_member, converting, refuse
from distribute_jax._errors import ArgumentError, PerReplicaError
from distribute_jax._messages import check_int_range


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
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Kinds of numbers, each of which can be converted to the later ones, but not to the earlier ones."""


def cast(value: Any, dtype: Any, name: str) -> jax.Array:
    """Converts a value to a variable's dtype; raises for 0.5 in an int or 300 in a uint8.

    Floats are rounded to shorter ones, as everywhere in JAX.
    """
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
