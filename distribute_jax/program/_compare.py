"""Are two outcomes of a step equal, to rounding?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]


def on_host(array: jax.Array) -> Array:
    """Gives an output as a NumPy array: keys as their bits, bfloat16 as float32."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    half = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return np.asarray(array.astype(jnp.float32) if half else array)


def exactly_equal(left: Array, right: Array) -> bool:
    """Tells whether all numbers are equal; two NaNs are, and so are 0.0 and -0.0."""
    return np.array_equal(left, right, equal_nan=bool(np.issubdtype(left.dtype, np.inexact)))


def equal_to_rounding(left: Array, right: Array, old: Array | float = 0.0) -> bool:
    """Tells whether what a step added to ``old`` is equal to rounding; integers must be equal.

    The change is compared, not the value, since a small step changes a weight only in its last
    digits, where a wrong factor would drown.
    """
    if not np.issubdtype(right.dtype, np.inexact):
        return bool(np.array_equal(left, right))
    if not np.array_equal(np.isnan(left), np.isnan(right)):
        return False
    single = right.dtype.itemsize <= (8 if np.iscomplexobj(right) else 4)
    allowed = (2e-4 if single else 1e-9) * largest(right - old)
    rounding = 16 * np.finfo(right.dtype).eps * largest(right)
    return bool(largest(left - right) <= allowed + rounding)


def largest(array: Array) -> float:
    """Gives the largest absolute number, NaNs left out; 0 for an empty array."""
    sizes = np.abs(np.asarray(array, np.complex128 if np.iscomplexobj(array) else np.float64))
    return float(np.max(np.nan_to_num(sizes), initial=0.0))
