"""What is written takes the dtype of the variable, where that loses nothing but digits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, PerReplicaError
from distribute_jax._fitting import fitting
from distribute_jax._tree import leaf_text

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
