"""Texts of trees, leaves and errors for messages, and small predicates of values and dtypes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._absent import describe_foreign
from distribute_jax._errors import MORE, ArgumentError, DistributeError

_XLA_STATUS = re.compile(r"(UNKNOWN|INTERNAL|ABORTED|CANCELLED|UNAVAILABLE|DEADLINE_EXCEEDED): ")


def path_text(path: KeyPath, root: str = "") -> str:
    """Returns a key path as the user would write it: ``args[0]['image']``."""
    return (root + jax.tree_util.keystr(path)) or "the value"


def leaf_text(leaf: Any) -> str:
    """Describes a leaf: ``float32[8,3]`` for an array, otherwise its type."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    if described := describe_foreign(leaf):
        return described
    text, kind = repr(leaf), type(leaf).__name__
    return f"{kind} {text:.60}" if len(text) <= 80 and "\n" not in text else f"a {kind}"


def not_a_name(what: str, name: Any, names: Iterable[str]) -> str:
    """Returns the message for an unknown name: the nearest names, or all."""
    known = sorted(names)
    near = get_close_matches(str(name), known)
    if near:
        return f"{name!r} is not the name of {what}. Did you mean {' or '.join(map(repr, near))}?"
    return f"{name!r} is not the name of {what}. The names are {', '.join(known)}."


def error_text(error: BaseException) -> str:
    """Returns the first and last line of an error's text, without JAX's C++ frames and ``MORE``."""
    lines = [line for line in str(error).split(f"\n{MORE}")[0].splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_text(error)}"


def is_runtime_failure(error: BaseException) -> bool:
    """True if a program failed while it ran, rather than because of the types of its inputs.

    If XLA runs a program in the calling thread, JAX raises a ValueError with XLA's text.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _XLA_STATUS.match(str(error)) is not None
    )


def listed(lines: list[str], most: int = 10) -> str:
    """Returns one indented line for each item, and how many were left out."""
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
    except DistributeError:  # a per-replica value, whose error says what to do with it
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
    """True for arrays and tracers; Python numbers are not arrays."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_numeric(dtype: Any) -> bool:
    """True for dtypes of numbers and bools, false for texts and records."""
    return bool(jnp.issubdtype(dtype, np.number) or dtype == np.bool_)


@functools.cache
def devices_hold(dtype: Any) -> bool:
    """True for the dtypes of numbers and bools that JAX has; NumPy counts a timedelta64 as an integer."""
    others = ("timedelta64", "float6_", "float128", "complex256")
    return is_numeric(dtype) and not dtype.name.startswith(others)


def is_key(value: Any) -> bool:
    """True for an array of typed random keys, which take part in no arithmetic."""
    return isinstance(value, jax.Array) and is_key_type(value)


def is_key_type(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
"""Programs compiled ahead of time do not take arrays of sub-byte dtypes (JAX 0.10.2)."""


def as_numbers(value: Any) -> Any:
    """Returns an array as it is sent or stored: keys as their data, sub-byte integers as bytes."""
    if (wider := _WIDER.get(str(value.dtype))) is not None:
        return value.astype(wider)
    return jax.random.key_data(value) if is_key_type(value) else value


def from_numbers(value: Any, like: Any) -> Any:
    """Returns the array of the type of ``like`` of which ``value`` is ``as_numbers``."""
    if not is_key_type(like):
        return value.astype(like.dtype) if str(like.dtype) in _WIDER else value
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(value, impl=kinds[0])


def on_bits(function: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """Applies a function to an array; to the underlying bits of random keys, and to int2 as int8.

    XLA's collectives on CPU give wrong int2 values, and write beyond their memory.
    """
    if is_key(array):
        bits = function(jax.random.key_data(array))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    if (dtype := array.dtype).name in ("int2", "uint2"):
        return function(array.astype(dtype.name.replace("2", "8"))).astype(dtype)
    return function(array)


def is_donated(value: Any) -> bool:
    """True for an array that was donated to a step; using it would crash JAX 0.10."""
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return concrete and value.is_deleted()


def is_number(value: Any) -> bool:
    """True for a Python number, but not a bool, which a step takes as data."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


_F = TypeVar("_F", bound=Callable[..., Any])


def promoting(function: _F) -> _F:
    """Runs a function with JAX's standard type promotion, whatever the user has set.

    With ``jax_numpy_dtype_promotion="strict"`` a sum divided by a count would be an error.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


MASKED = (
    "JAX arrays have no mask, so the masked values would be used as data. Pass the values and the mask "
    "as two arrays: array.filled(0) and np.ma.getmaskarray(array)."
)


def check_not_masked(value: Any, got_by: str) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{got_by} got a NumPy masked array, {leaf_text(value.data)}. {MASKED}")


def check_int_range(value: Any, got_by: str) -> Any:
    """Returns a value as it is; raises for a mask, or an integer that needs more bits than JAX has.

    JAX has 32, or 64 in x64 mode. ``got_by``, such as ``"all_reduce"``, begins the message.
    """
    check_not_masked(value, got_by)
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
    if array.dtype.kind == "O":  # an int beyond 64 bits, in NumPy
        return all(isinstance(number, int) for number in array.flat)
    return array.dtype.kind in "iu" and array.dtype.itemsize * 8 > bits


PyTree: TypeAlias = Any
"""Nested containers that ``jax.tree`` understands."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf in a tree, as in ``jax.tree_util``."""

flatten = jax.tree_util.default_registry.flatten
"""``jax.tree.flatten`` in C, for each step and batch: takes a tree and None, or what decides about leaves."""

StepFunction: TypeAlias = Callable[..., Any]
"""A function written for one replica."""

Kwargs: TypeAlias = Mapping[str, Any]


def size_text(count: int) -> str:
    """Returns a number of bytes in B, KiB, MiB or GiB."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while value >= 1024 and (larger := next(units, None)):
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
