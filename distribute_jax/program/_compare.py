"""Compares the outputs of two runs of a step, up to rounding.

The gradient of a parameter that the loss does not depend on, such as the bias of an attention's keys, is the
rounding error of a sum that should be 0. In another order the sum has another error of the same size, and
Adam makes steps of nearly full size of it, so sizes do not distinguish it from a mistake. Changing the last
digits of the step's inputs does: what changes as much by that is rounding.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import local_copy_of_replicated, outside_mesh
from distribute_jax._messages import is_key
from distribute_jax.processes import doing
from distribute_jax.program._jaxprs import equations

Array = np.ndarray[Any, Any]


class Verdict(enum.Enum):
    """The result of a comparison."""

    EQUAL = "equal"
    """They agree, and a change of twice the size would not."""
    UNEQUAL = "unequal"
    """They differ by more than rounding."""
    TOO_SMALL = "too small"
    """Changes are hardly larger than the spacing of the numbers that they are added to: undecided."""
    NOISE = "noise"
    """Changes are hardly larger than the rounding errors of computing them: undecided."""


def on_host(array: jax.Array) -> Array:
    """Returns an output as a NumPy array: keys as their bits, bfloat16 as float32.

    In a job all processes must call it together, since each has a part of a sharded output.
    """
    with doing("waiting for the results of a step"):
        array = local_copy_of_replicated(array)
        if is_key(array):
            return np.asarray(jax.random.key_data(array))
        half = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
        # NumPy's astype: JAX's would compile a program for each shape.
        return np.asarray(array).astype(np.float32) if half else np.asarray(array)


def exactly_equal(left: Array, right: Array) -> bool:
    """True if all numbers are equal; NaN equals NaN, and 0.0 equals -0.0."""
    return np.array_equal(left, right, equal_nan=bool(np.issubdtype(left.dtype, np.inexact)))


def compared(
    left: Array,
    right: Array,
    old: Array | float = 0.0,
    *,
    eps: float | None = None,
    relative: float | None = None,
    noise: float = 0.0,
    every: bool = True,
) -> Verdict:
    """Compares what a step added to ``old``, each entry relative to its change; integers must be equal.

    Changes are compared rather than values, since a small step changes only the last digits of a weight,
    where a wrong factor would not be noticed. An entry may differ by ``relative`` of its change, by default
    32 ``eps``, plus ``noise``. ``eps`` is that of the step's dtype, if it is coarser than ``right``. With
    ``every`` nearly every change must be large enough to compare; else most of the array's.
    """
    if not np.issubdtype(right.dtype, np.inexact):
        return Verdict.EQUAL if np.array_equal(left, right) else Verdict.UNEQUAL
    if not same_specials(left, right):
        return Verdict.UNEQUAL
    eps = eps or float(np.finfo(right.dtype).eps)
    left, right, old = finite(left), finite(right), finite(np.broadcast_to(old, right.shape))
    change, gap = np.abs(right - old), np.abs(left - right)
    spacing = 2 * eps * np.maximum(np.abs(right), np.abs(old))
    # The terms of a sum may be as large as other entries' changes, and so are their rounding errors.
    floor = spacing + 16 * eps * largest(change)
    if np.any(gap > floor + noise + (_SPACINGS * eps if relative is None else relative) * change):
        return Verdict.UNEQUAL
    # A change of at least four floors is distinguishable from half or twice of it; so is a smaller one that
    # agrees in its leading digits.
    agrees = (change >= 4 * spacing) & (gap <= 0.01 * change)

    def is_hidden(floor: Array) -> bool:
        small = (change < 4 * floor) & ~agrees & ((change > 0) | (gap > 0))
        if every:
            return bool(_ENTRIES_PER_SMALL_ONE * np.count_nonzero(small) > small.size)
        squares = np.maximum(change, gap) ** 2
        return bool(2 * np.sum(squares[small]) > np.sum(squares))

    if is_hidden(floor):
        return Verdict.TOO_SMALL
    return Verdict.NOISE if noise and is_hidden(floor + noise) else Verdict.EQUAL


OTHER_ORDER = 2e-4
"""The relative difference that sums in another order make in float32, if nothing else decides."""
_SPACINGS = 32
"""The number of relative spacings of its change that an entry may differ by."""
_ENTRIES_PER_SMALL_ONE = 1024
"""One entry of so many may be too small to compare: a gradient may be near zero anywhere."""


def same_specials(left: Array, right: Array) -> bool:
    """True if NaNs and infinities are at the same indices, with the same signs."""
    if np.isfinite(left).all() and np.isfinite(right).all():
        return True
    special = ~(np.isfinite(left) & np.isfinite(right))
    return np.array_equal(left[special], right[special], equal_nan=True)


def finite(array: Array) -> Array:
    """Returns the numbers in double precision, with 0 for NaNs and infinities."""
    array = np.asarray(array, np.complex128 if np.iscomplexobj(array) else np.float64)
    return np.where(np.isfinite(array), array, 0)


def spacing_of(array: Any) -> float:
    """Returns the machine epsilon of a floating-point array or abstract value, 0.0 for others."""
    finfo: Any = jnp.finfo
    return float(finfo(array.dtype).eps) if jnp.issubdtype(array.dtype, jnp.inexact) else 0.0


def largest(array: Array) -> float:
    """Returns the largest absolute finite number; 0 if there is none."""
    return float(np.max(np.abs(finite(array)), initial=0.0))


_INCOMPARABLE = (
    "cannot be compared: each replica has its own value, and neither their sum (off by up to {sum}) nor "
    "their mean (off by up to {mean}) is the value on one device. Reduce it in the step with "
    "all_reduce, or return one row for each example"
)
_SHAPES = (
    "cannot be compared: a replica has shape {part}, one device {one}, which is not one row for each "
    "example. Reduce it in the step with all_reduce, or return one row for each example"
)


def difference(
    parts: Array,
    one: Array,
    *,
    rows: Any,
    counts: Sequence[int] | None,
    eps: float,
    relative: float,
    noise: float = 0.0,
) -> str | None:
    """Describes how the replicas' values of a result differ from the value on one device.

    Rows for each example must be the same rows. Of other values the sum (of parts of a loss, or counts) or
    the mean (of means over equal shares) must be the value on one device.

    ``parts`` are stacked, (N, ...); ``rows`` says whether the result has one row for each example, and is
    neither True nor False if that is not known. An entry may differ by ``relative`` of its size and
    ``noise``.
    """
    if rows is True or (rows is not False and parts.shape[1:] != one.shape):
        joined = real_rows(parts, counts)
        if joined is not None and joined.shape == one.shape:
            if compared(joined, one, eps=eps, relative=relative, noise=noise) is Verdict.UNEQUAL:
                return f"its rows differ by up to {largest(finite(joined) - finite(one)):.3g}"
            return None
    if parts.shape[1:] != one.shape:
        return _SHAPES.format(part=parts.shape[1:], one=one.shape)
    if np.array_equal(parts, np.broadcast_to(one, parts.shape)):
        return None
    wide = np.complex128 if np.iscomplexobj(parts) else np.float64
    # The sum of infinities of both signs is NaN on one device too.
    with np.errstate(invalid="ignore"):
        total = parts.astype(wide).sum(0)
    # The rounding errors of a sum are as large as those of its terms.
    tolerance = 16 * eps * np.abs(finite(parts)).sum(0) + relative * np.abs(finite(one)) + noise
    if not np.issubdtype(one.dtype, np.inexact):
        tolerance = np.zeros(())
    off = {}
    for name, value in (("sum", total), ("mean", total / len(parts))):
        gap = np.abs(finite(value) - finite(one))
        if same_specials(value, one) and np.all(gap <= tolerance):
            return None
        off[name] = f"{largest(gap):.3g}" if same_specials(value, one) else "nan"
    return _INCOMPARABLE.format(**off)


def real_rows(parts: Array, counts: Sequence[int] | None) -> Array | None:
    """Concatenates the real rows of all replicas, (N, rows, ...)."""
    if parts.ndim < 2:
        return None
    ends: Sequence[int | None] = counts or [None] * len(parts)
    return np.concatenate([part[:end] for part, end in zip(parts, ends, strict=True)])


_NOISE_FACTOR = 8
"""A difference of up to so many times the change by nudged inputs is taken for rounding."""


NUDGES = (1, -1, 2, -2, 3, -3, 4, -4)
"""By how many units in the last place the inputs are changed, one after the other.

The last place is that of the program's least precise dtype, as ``coarsest`` returns it.
"""


def nudged_outcome(
    run: Callable[[list[Any]], list[Any]],
    flat: Sequence[Any],
    change: float,
    old: Sequence[int | None],
) -> list[Any]:
    """Runs a program on inputs that are changed by a relative ``change``.

    ``old`` has the position of the old value of each of the first outputs, None if it has none. New values
    are corrected by the change of the old ones, since only what the step adds to them matters.
    """
    with outside_mesh():
        inputs = [_nudged(x, change) for x in flat]
        moved = [
            None if i is None or not _is_inexact(flat[i]) else _changed(_moved, inputs[i], flat[i])
            for i in old
        ]
    outs = run(inputs)
    with outside_mesh():
        back = [
            out if by is None else _changed(operator.sub, out, by)
            for out, by in zip(outs, moved, strict=False)
        ]
    return [*back, *outs[len(back) :]]


def noise_of(array: Array, nudged: Iterable[Array]) -> float:
    """Returns the size of a difference that is taken for rounding."""
    return _NOISE_FACTOR * max((largest(finite(array) - finite(n)) for n in nudged), default=0.0)


def _nudged(x: Any, change: float) -> Any:
    if not _is_inexact(x):
        return copied([x])[0]
    size = max(abs(change), spacing_of(x))
    return _changed(lambda x: x * (1 + math.copysign(size, change)), x)


def _moved(new: Any, old: Any) -> Any:
    np_or_jnp: Any = np if isinstance(old, np.ndarray) else jnp
    return np_or_jnp.where(np_or_jnp.isfinite(old), new - old, 0)


def _changed(change: Callable[..., Any], x: jax.Array, *more: jax.Array) -> jax.Array:
    """Applies a function of arrays, on the host if possible: JAX would compile it for each shape."""
    if not all(array.is_fully_addressable for array in (x, *more)):
        return jnp.asarray(change(x, *more), x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        new = np.asarray(change(*map(np.asarray, (x, *more)))).astype(x.dtype)
    placed: jax.Array = jax.device_put(new, x.sharding)
    return placed


def copied(flat: Sequence[Any]) -> list[Any]:
    """Copies the arrays among flat inputs, so that the originals are not donated."""
    return [_copied(x) if isinstance(x, jax.Array) else x for x in flat]


def _copied(x: jax.Array) -> jax.Array:
    device: Any = next(iter(x.sharding.device_set))
    if device.platform == "cpu" and x.is_fully_addressable and not is_key(x):
        return _changed(np.asarray, x)
    return jnp.copy(x)


def _is_inexact(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def coarsest(jaxpr: jex_core.Jaxpr) -> float:
    """Returns the largest machine epsilon among the values that a program computes."""
    outs = (v.aval for eqn in equations(jaxpr) for v in eqn.outvars)
    return max((spacing_of(aval) for aval in outs if hasattr(aval, "dtype")), default=0.0)
