"""In which dtype replicas are added up, and which leaves can be added at all: one rule for all methods."""

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
    """Returns the dtype of a sum over the replicas, as of ``jnp.sum``, where narrow integers get wider."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return dtype
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def mean_dtype(dtype: Any) -> Any:
    """Returns the dtype of a mean over the replicas: floating."""
    return jnp.result_type(float) if jnp.issubdtype(dtype, jnp.integer) else dtype


def mean_accumulator(dtype: Any) -> Any:
    """Returns the dtype in which values are added up for a mean.

    The sum of float16 values leaves their range long before their mean does. bfloat16 has the range
    of float32 and stays what it is, since twice the bytes would cross the network.
    """
    finfo: Any = jnp.finfo
    is_short = (
        jnp.issubdtype(dtype, jnp.floating) and finfo(dtype).maxexp < finfo(jnp.bfloat16).maxexp
    )
    return jnp.dtype(jnp.float32) if is_short else mean_dtype(dtype)


def wide(dtype: Any) -> Any:
    """Returns the dtype in which an addition one by one keeps the last bit: float32 at least."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def as_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """Converts an array; one that has the dtype stays as it is, weak or not."""
    return array if array.dtype == dtype else array.astype(dtype)


def check_summable(leaves: Iterable[tuple[str, Any]], method: str) -> None:
    """Raises for leaves that are not numbers."""
    bad = [f"{name}: {leaf_text(leaf)}" for name, leaf in leaves if not is_numeric(leaf)]
    if bad:
        raise ArgumentError(_REFUSED.format(method=method, lines=listed(bad)))


def is_numeric(leaf: Any) -> bool:
    """Returns whether a leaf is a number or an array of them; a bool is not."""
    if isinstance(leaf, (bool, str, bytes)):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (int, float, complex))
    return bool(jnp.issubdtype(dtype, jnp.number))


def is_joinable(leaf: Any) -> bool:
    """Returns whether a leaf can be joined with others along a dim: numbers and bools."""
    dtype = getattr(leaf, "dtype", None)
    is_bool = isinstance(leaf, bool) or (dtype is not None and jnp.issubdtype(dtype, jnp.bool_))
    return is_bool or is_numeric(leaf)
