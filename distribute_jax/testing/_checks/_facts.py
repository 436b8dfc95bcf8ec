"""What a check found out: each fact says what was looked at, what came, and what should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import LoweringError
from distribute_jax._tree import path_text

ROUNDING = 1e-5
"""Relative to the largest number of an array: float32 sums in another order differ by less."""


@dataclass(frozen=True)
class Fact:
    """One comparison of a check."""

    what: str
    """What was looked at, in words."""
    received: Any
    expected: Any
    rtol: float = ROUNDING
    """How far floating numbers may be apart, relative to the largest; 0 for bitwise."""

    def holds(self) -> bool:
        """Tells whether what was received is what was expected."""
        if isinstance(self.expected, (np.ndarray, np.generic, jax.Array)):
            return _equal_arrays(self.received, np.asarray(self.expected), self.rtol)
        if isinstance(self.expected, float):
            return _equal_numbers(np.asarray(self.received), np.asarray(self.expected), self.rtol)
        return type(self.received) is type(self.expected) and self.received == self.expected


def _equal_arrays(received: Any, expected: np.ndarray[Any, Any], rtol: float) -> bool:
    if not isinstance(received, (np.ndarray, np.generic, jax.Array)):
        return False
    array = np.asarray(received)
    return array.dtype == expected.dtype and _equal_numbers(array, expected, rtol)


def _equal_numbers(
    received: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], rtol: float
) -> bool:
    if received.shape != expected.shape:
        return False
    if not jnp.issubdtype(received.dtype, jnp.floating):
        return bool(np.array_equal(received, expected))
    if rtol == 0:
        return received.tobytes() == expected.astype(received.dtype).tobytes()
    a, b = received.astype(np.float64), expected.astype(np.float64)
    return bool(np.allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(initial=1e-30)))


def same(what: str, received: Any, expected: Any, rtol: float = ROUNDING) -> Iterator[Fact]:
    """Compares two nests leaf by leaf; where their structures differ, these."""
    found, wanted = (jax.tree_util.tree_flatten_with_path(nest) for nest in (received, expected))
    if str(found[1]) != str(wanted[1]):
        yield Fact(f"the structure of {what}", str(found[1]), str(wanted[1]))
        return
    for (path, leaf), (_, expectation) in zip(found[0], wanted[0], strict=True):
        name = f"{what}, leaf {path_text(path)}" if path else what
        yield Fact(name, leaf, expectation, rtol)


def on_all(
    what: str, parts: Sequence[Any], expected: Any, rtol: float = ROUNDING
) -> Iterator[Fact]:
    """Compares what every replica has with one and the same nest."""
    for i, part in enumerate(parts):
        yield from same(f"{what} on replica {i}", part, expected, rtol)


def on_each(what: str, parts: Sequence[Any], expected: Sequence[Any]) -> Iterator[Fact]:
    """Compares what every replica has with what it should have."""
    yield Fact(f"the number of replicas that have {what}", len(parts), len(expected))
    for i, (part, wanted) in enumerate(zip(parts, expected, strict=False)):
        yield from same(f"{what} on replica {i}", part, wanted)


def refuses(what: str, call: Callable[[], Any], kind: type[Exception]) -> Fact:
    """Expects a call to raise an error of a kind."""
    found = outcome(call, kind)
    return Fact(what, found, kind.__name__)


def succeeds(what: str, call: Callable[[], Any]) -> Fact:
    """Expects a call to raise nothing."""
    return Fact(what, outcome(call), "no error")


def outcome(call: Callable[[], Any], kind: type[Exception] | None = None) -> str:
    """Says which error a call raises: the kind alone where it is the one that was asked for."""
    try:
        call()
    except LoweringError:  # ends the check: it says nothing about what was called
        raise
    except Exception as error:
        if kind is not None and isinstance(error, kind):
            return kind.__name__
        return error_line(error)
    return "no error"


def error_line(error: Exception) -> str:
    """Gives an error as one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
