"""Text for messages: trees, leaves and errors in a few words; and the range of integers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._absent import foreign
from distribute_jax._errors import ArgumentError, DistributeError


def path_text(path: KeyPath, root: str = "") -> str:
    """Writes a key path the way a user would reach the leaf: ``args[0]['image']``."""
    return (root + jax.tree_util.keystr(path)) or "the value"


def leaf_text(leaf: Any) -> str:
    """Describes a leaf in a few words: ``float32[8,3]`` for an array, else its type."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    if described := foreign(leaf):
        return described
    text, kind = repr(leaf), type(leaf).__name__
    return f"{kind} {text:.60}" if len(text) <= 80 and "\n" not in text else f"a {kind}"


def not_a_name(what: str, name: Any, names: Iterable[str]) -> str:
    """Begins the error for a name that does not exist: the nearest ones, or else all."""
    known = sorted(names)
    near = get_close_matches(str(name), known)
    if near:
        return f"{name!r} is not the name of {what}. Did you mean {' or '.join(map(repr, near))}?"
    return f"{name!r} is not the name of {what}. The names are {', '.join(known)}."


def error_text(error: BaseException) -> str:
    """Returns the first and the last line of an error's text: JAX puts C++ frames between them."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def listed(lines: list[str], most: int = 10) -> str:
    """Puts one item on each line, indented, and says how many were left out."""
    shown = [f"  {line}" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"  … and {len(lines) - most} more")
    return "\n".join(shown)


def real_array(caller: str, name: str, value: Any) -> jax.Array:
    """Returns an argument as an array of real numbers or bools, or raises an ``ArgumentError``."""
    try:
        if isinstance(value, (str, bytes, dict)):
            raise TypeError(f"a {type(value).__name__}")
        array = jnp.asarray(value)
    except DistributeError:  # a value of several replicas says what to do with it
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{caller} got {name}={leaf_text(value)}, which is not an array of numbers. Pass one array "
            "with the batch as dim 0; with several outputs, each has its loss and metrics."
        ) from error
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer, np.bool_)):
        raise ArgumentError(
            f"{caller} got {name} of dtype {array.dtype}. It takes real numbers and bools: pass "
            "jnp.abs(value), or the part that you mean."
        )
    return array


def is_array(value: Any) -> bool:
    """Returns whether a value is an array or a tracer of one (Python numbers are not)."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_numeric(dtype: Any) -> bool:
    """Returns whether a dtype is of numbers or bools, which are their bytes: texts and records are not."""
    return bool(jnp.issubdtype(dtype, np.number) or dtype == np.bool_)


def is_key(value: Any) -> bool:
    """Returns whether a value is an array of typed random keys, which JAX lets nobody compute with."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def on_bits(function: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """Returns a function of an array of numbers; of random keys it is computed of their bits."""
    if not is_key(array):
        return function(array)
    bits = function(jax.random.key_data(array))
    keys: jax.Array = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    return keys


def is_donated(value: Any) -> bool:
    """Returns whether a step has taken the memory of an array: to use it crashes JAX 0.10."""
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return concrete and value.is_deleted()


def is_number(value: Any) -> bool:
    """Returns whether a value is a Python number that a step takes as data; a bool is not."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


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


def check_int_range(value: Any, got_by: str) -> Any:
    """Returns any value as it is; raises where an integer in it needs more bits than JAX has.

    These are 32 unless its x64 mode is on. The message says who got it, such as ``"all_reduce"``.
    """
    config: Any = jax.config
    bits = 64 if config.jax_enable_x64 else 32
    if isinstance(value, int):
        low, high, unsigned = value, value, False
    elif isinstance(value, (np.ndarray, np.generic)) and value.size and _may_exceed(value, bits):
        low, high, unsigned = int(value.min()), int(value.max()), value.dtype.kind == "u"
    else:
        return value
    most = 2 ** (bits if unsigned else bits - 1) - 1
    if high > most or low < (0 if unsigned else -most - 1):
        text = f"the int {value!r:.60}" if isinstance(value, int) else leaf_text(value)
        raise ArgumentError(
            f"{got_by} got {text}, which does not fit {'u' if unsigned else ''}int{bits}: it would wrap to "
            'another number. Pass a float, or turn on jax.config.update("jax_enable_x64", True).'
        )
    return value


def _may_exceed(array: Any, bits: int) -> bool:
    if array.dtype.kind == "O":  # what NumPy makes of an int beyond 64 bits
        return all(isinstance(number, int) for number in array.flat)
    return array.dtype.kind in "iu" and array.dtype.itemsize * 8 > bits


PyTree: TypeAlias = Any
"""Nested containers that ``jax.tree`` understands."""

KeyPath: TypeAlias = tuple[Any, ...]
"""Where a leaf stands in a tree, as ``jax.tree_util`` gives it."""

StepFunction: TypeAlias = Callable[..., Any]
"""A function written for one replica."""

Kwargs: TypeAlias = Mapping[str, Any]


def size_text(count: int) -> str:
    """Returns a number of bytes in the unit that suits it."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while value >= 1024 and (larger := next(units, None)):
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
