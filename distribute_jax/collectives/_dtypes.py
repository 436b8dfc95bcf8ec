"""The dtypes in which all methods sum over the replicas, and the leaves that can be summed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import leaf_text, listed

_REFUSED = """\
{method} got leaves that cannot be combined over the replicas:
{lines}
It takes floating, complex and integer arrays. Convert a bool with value.astype(jnp.int32) in the \
function given to run, and leave other leaves out."""


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype of a sum over the replicas, as of ``jnp.sum``, which widens narrow integers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return dtype
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def mean_dtype(dtype: Any) -> Any:
    """Returns the dtype of a mean over the replicas: floating."""
    return jnp.result_type(float) if jnp.issubdtype(dtype, jnp.integer) else dtype


def mean_accumulator(dtype: Any) -> Any:
    """Returns the dtype in which values are summed for a mean.

    A sum of float16 values can overflow although their mean does not. bfloat16 has the range of
    float32 and is kept, since float32 would double the traffic.
    """
    finfo: Any = jnp.finfo
    is_short = (
        jnp.issubdtype(dtype, jnp.floating) and finfo(dtype).maxexp < finfo(jnp.bfloat16).maxexp
    )
    return jnp.dtype(jnp.float32) if is_short else mean_dtype(dtype)


def wide(dtype: Any) -> Any:
    """Returns a dtype, at least float32, in which sequential additions lose no bits of a narrow dtype."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def as_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """Converts an array, unless it has the dtype; then it stays weakly typed if it is."""
    return array if array.dtype == dtype else array.astype(dtype)


def check_summable(leaves: Iterable[tuple[str, Any]], method: str) -> None:
    """Raises an error that lists the leaves that are not numbers."""
    bad = [f"{name}: {leaf_text(leaf)}" for name, leaf in leaves if not is_numeric(leaf)]
    if bad:
        raise ArgumentError(_REFUSED.format(method=method, lines=listed(bad)))


def is_numeric(leaf: Any) -> bool:
    """True if a leaf is a number or an array of numbers; bools are not."""
    if isinstance(leaf, (bool, str, bytes)):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (int, float, complex))
    return bool(jnp.issubdtype(dtype, jnp.number))


def is_joinable(leaf: Any) -> bool:
    """True for numbers, bools and arrays of them, which can be concatenated."""
    dtype = getattr(leaf, "dtype", None)
    is_bool = isinstance(leaf, bool) or (dtype is not None and jnp.issubdtype(dtype, jnp.bool_))
    return is_bool or is_numeric(leaf)
