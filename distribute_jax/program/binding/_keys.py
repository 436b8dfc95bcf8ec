"""Hashable keys for what a step captures: equal keys mean that the same program serves."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, cast

import numpy as np


@dataclass(frozen=True, eq=False)
class Identity:
    """A key part for a value that is only equal to itself; it keeps the value alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Compares the values held, by identity."""
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        """Hashes the identity of the value held."""
        return id(self.value)


def plain_key(value: Any) -> Any:
    """Keys a number or text by its very value: 0.0 is not -0.0, and NaN is NaN."""
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    if isinstance(value, np.generic):
        return (type(value), value.dtype, value.tobytes())
    return (type(value), value)


def opaque_key(value: Any) -> Any:
    """Keys an opaque value: by equality where it defines one, else by identity."""
    if isinstance(value, np.ndarray):
        return ("ndarray", value.shape, str(value.dtype), hash(value.tobytes()))
    if cast("Any", type(value)).__hash__ in (None, object.__hash__) or isinstance(
        value, types.FunctionType
    ):
        return Identity(value)
    try:
        hash(value)
    except Exception:  # a class may refuse in its own words, as memoryview does
        return Identity(value)
    return (type(value), value)


def mapping_key(key: Any) -> Any:
    """Keys a key of a mapping, which a class of the user's may have made unhashable."""
    try:
        hash(key)
    except Exception:
        return id(key)
    return key
