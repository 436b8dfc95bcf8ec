"""Which dtypes meet: integers of the host that JAX can hold, and promotion in the library's arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import leaf_text

_F = TypeVar("_F", bound=Callable[..., Any])


def promoting(function: _F) -> _F:
    """Lets a function compute with JAX's standard promotion, whatever the user set for other code.

    With ``jax_numpy_dtype_promotion="strict"`` a sum divided by a count would be an error.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def fitting(value: Any, got_by: str) -> Any:
    """Gives a value as it is: a number, an array, or anything else.

    Args:
        value: maybe a Python int or a NumPy array of integers.
        got_by: who got it, for the message: ``"all_reduce"``.

    Raises:
        ValueError: an integer needs more bits than JAX has, 32 unless its x64 mode is on.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.ndarray, np.generic)):
        return value
    if not isinstance(value, int) and not _holds_integers(value):
        return value
    config: Any = jax.config
    bits = 64 if config.jax_enable_x64 else 32
    unsigned = not isinstance(value, int) and value.dtype.kind == "u"
    limits = np.iinfo(f"{'u' if unsigned else ''}int{bits}")
    low, high = (value, value) if isinstance(value, int) else (value.min(), value.max())
    if int(low) < limits.min or int(high) > limits.max:
        text = f"the int {value!r:.60}" if isinstance(value, int) else leaf_text(value)
        raise ArgumentError(
            f"{got_by} got {text}, which does not fit {limits.dtype}: it would wrap to another number. "
            'Pass a float, or turn on jax.config.update("jax_enable_x64", True).'
        )
    return value


def _holds_integers(array: Any) -> bool:
    if array.dtype.kind == "O":  # what NumPy makes of an int beyond 64 bits
        return array.size > 0 and all(isinstance(number, int) for number in array.flat)
    return array.dtype.kind in "iu" and array.size > 0
