"""Rules of variables: synchronization and aggregation, casts of what is written, creation in a trace."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, PerReplicaError
from distribute_jax._messages import fitting, leaf_text


class VariableSynchronization(enum.Enum):
    """When the replicas' values of a variable become one.

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization
    """

    __module__ = "distribute_jax"

    AUTO = "AUTO"
    """``ON_WRITE``."""
    NONE = "NONE"
    """Never: refused, since the replicas would drift apart."""
    ON_WRITE = "ON_WRITE"
    """At every write: the variable is mirrored."""
    ON_READ = "ON_READ"
    """When it is read outside of ``run``: each replica has its own value."""


class VariableAggregation(enum.Enum):
    """How the replicas' values become one.

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableAggregation
    """

    __module__ = "distribute_jax"

    NONE = "NONE"
    """Not at all: the replicas must write the same value, which is proved."""
    SUM = "SUM"
    """Their sum."""
    MEAN = "MEAN"
    """Their mean."""
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
    """The value of replica 0."""


def checked_kinds(
    synchronization: Any, aggregation: Any, dtype: Any
) -> tuple[VariableSynchronization, VariableAggregation]:
    """Checks what a variable is asked to be, and turns AUTO into ON_WRITE."""
    for name, value, kind in (
        ("synchronization", synchronization, VariableSynchronization),
        ("aggregation", aggregation, VariableAggregation),
    ):
        if not isinstance(value, kind):
            raise ArgumentError(
                f"dj.Variable got {name}={value!r}, which is no {kind.__name__}. Use one of "
                + ", ".join(f"dj.{kind.__name__}.{member.name}" for member in kind)
                + "."
            )
    if synchronization is VariableSynchronization.NONE:
        raise ArgumentError(
            "dj.Variable got synchronization=NONE, which is invalid: the replicas' values would drift "
            "apart for good. Use ON_WRITE, or ON_READ where each replica keeps its own value."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise ArgumentError(
            f"dj.Variable got aggregation=MEAN for {dtype}: the mean of integers is not an integer. "
            "Use a floating dtype, SUM or ONLY_FIRST_REPLICA."
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Each kind of number can be written where a later one is kept, not the other way round."""


def cast(value: Any, dtype: Any, name: str) -> jax.Array:
    """Turns a value into an array of a variable's dtype.

    A shorter float is rounded, as everywhere in JAX; integers must fit.

    Raises:
        ValueError: the variable cannot hold such numbers: a float in an integer, 300 in a uint8.
    """
    traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    # NumPy holds a large Python integer, JAX would refuse it or wrap it.
    given: Any = jnp.asarray(value) if traced else np.asarray(value)
    if given.dtype != dtype and not _fits(given, dtype):
        raise ArgumentError(
            f"Variable {name!r} has dtype {dtype} and was given {given.dtype}"
            f"{'' if isinstance(given, jax.core.Tracer) else f' {given!s:.60}'}, which would be changed "
            "silently. Keep such numbers in a variable that can hold them, as dj.Variable(0.0) holds "
            f"floats, or say what becomes of them: jnp.round(value).astype({str(dtype)!r})."
        )
    return jnp.asarray(given, dtype)


def first_value(value: Any, name: str) -> jax.Array:
    """Gives the array that a variable starts with, or raises for what no array can be made of."""
    array: Any = fitting(value, f"dj.Variable {name!r}")
    if isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
        return jnp.asarray(array)
    leaves = jax.tree.leaves(array, is_leaf=lambda leaf: leaf is None)
    if (
        isinstance(array, dict)
        or not leaves
        or any(leaf is None or isinstance(leaf, str) for leaf in leaves)
    ):
        raise ArgumentError(
            f"dj.Variable {name!r} got {leaf_text(value)} as its value, which is neither a number nor an "
            "array. Pass one, as dj.Variable(0.0) or dj.Variable(jnp.zeros(3))."
        )
    return jnp.asarray(array)


def _fits(given: Any, dtype: Any) -> bool:
    own, wanted = _kind(given.dtype), _kind(dtype)
    if own is None or wanted is None or own != wanted:
        return own is not None and wanted is not None and own < wanted
    if not jnp.issubdtype(dtype, jnp.integer):
        return True
    info: Any = jnp.iinfo
    low, high = info(dtype).min, info(dtype).max
    if low <= info(given.dtype).min and info(given.dtype).max <= high:
        return True
    if isinstance(given, jax.core.Tracer):
        return False
    if isinstance(given, jax.Array) and not given.is_fully_addressable:
        return False
    numbers = np.asarray(given)
    return numbers.size == 0 or (low <= int(numbers.min()) and int(numbers.max()) <= high)


def _kind(dtype: Any) -> int | None:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)


def different_values(name: str) -> PerReplicaError:
    """Says why a per-replica value cannot be written from outside, and what to do."""
    return PerReplicaError(
        f"Variable {name!r} was given a per-replica value in cross-replica context; its replicas would "
        "drift apart. Reduce it first: v.assign(strategy.reduce('mean', value)), or assign inside run."
    )


class _Notes(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[tuple[Any, Any]]] = []


_notes = _Notes()


@contextmanager
def noting_created() -> Iterator[list[tuple[Any, Any]]]:
    """Gives a list that every ``Variable`` made in the block joins, with its first raw value."""
    _notes.lists.append([])
    try:
        yield _notes.lists[-1]
    finally:
        _notes.lists.pop()


def note_created(variable: Any, raw: Any) -> None:
    """Notes a variable that is being made."""
    if _notes.lists:
        _notes.lists[-1].append((variable, raw))
