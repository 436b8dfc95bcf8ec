"""Are two outcomes of a step equal, to rounding, and is that enough to tell that the step is right?"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import whole_here

Array = np.ndarray[Any, Any]


class Verdict(enum.Enum):
    """What the comparison of two outcomes tells."""

    EQUAL = "equal"
    """They agree, and nearly every change, had it been twice as large, would not."""
    UNEQUAL = "unequal"
    """They differ by more than rounding."""
    TOO_SMALL = "too small"
    """Some changes are hardly larger than their rounding, so it cannot be told."""


def on_host(array: jax.Array) -> Array:
    """Gives an output as a NumPy array: keys as their bits, bfloat16 as float32.

    Of what each replica has for itself the processes of a job hold parts, so all call it together.
    """
    array = whole_here(array)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    half = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return np.asarray(array.astype(jnp.float32) if half else array)


def exactly_equal(left: Array, right: Array) -> bool:
    """Tells whether all numbers are equal; two NaNs are, and so are 0.0 and -0.0."""
    return np.array_equal(left, right, equal_nan=bool(np.issubdtype(left.dtype, np.inexact)))


def equal_to_rounding(left: Array, right: Array, old: Array | float = 0.0) -> bool:
    """Whether what a step added to ``old`` is equal to rounding; integers must be equal."""
    return compared(left, right, old, relative=OTHER_ORDER) is not Verdict.UNEQUAL


def compared(
    left: Array,
    right: Array,
    old: Array | float = 0.0,
    *,
    eps: float | None = None,
    relative: float | None = None,
    noise: float = 0.0,
) -> Verdict:
    """Compares what a step added to ``old``, each entry by its own size; integers must be equal.

    The change is compared, not the value, since a small step changes a weight only in its last
    digits, where a wrong factor would drown. NaNs and infinities must stand in the same places.

    Args:
        left: one outcome.
        right: the other.
        old: what was there before.
        eps: the relative spacing of the numbers as the step holds them, where it is wider than that
            of ``right``.
        relative: how much of its change an entry may differ by; None for some spacings.
        noise: how much any entry may differ by besides.
    """
    if not np.issubdtype(right.dtype, np.inexact):
        return Verdict.EQUAL if np.array_equal(left, right) else Verdict.UNEQUAL
    if not same_specials(left, right):
        return Verdict.UNEQUAL
    eps = eps or float(np.finfo(right.dtype).eps)
    left, right, old = finite(left), finite(right), finite(np.broadcast_to(old, right.shape))
    moved, apart = np.abs(right - old), np.abs(left - right)
    spacing = 2 * eps * np.maximum(np.abs(right), np.abs(old))
    # Sums are as exact as their terms, which may be as large as other entries' changes.
    floor = spacing + 16 * eps * largest(moved) + noise
    if np.any(apart > floor + (_SPACINGS * eps if relative is None else relative) * moved):
        return Verdict.UNEQUAL
    # Half or twice a change of four floors differs from it by more than the one that fits; so it does
    # from a smaller one that agrees with the other outcome in its first digits.
    agrees = (moved >= 4 * spacing) & (apart <= 0.01 * moved)
    hidden = (moved < 4 * floor) & ~agrees & ((moved > 0) | (apart > 0))
    return Verdict.TOO_SMALL if _FEW * np.count_nonzero(hidden) > hidden.size else Verdict.EQUAL


OTHER_ORDER = 2e-4
"""The relative difference that sums in another order make in float32, where nothing else decides."""
_SPACINGS = 32
"""So many relative spacings of its change may an entry differ by."""
_FEW = 1024
"""One entry of so many may be too small to tell: a gradient may be near zero anywhere."""


def same_specials(left: Array, right: Array) -> bool:
    """Whether NaNs and infinities stand in the same places, with the same signs."""
    if np.isfinite(left).all() and np.isfinite(right).all():
        return True
    special = ~(np.isfinite(left) & np.isfinite(right))
    return np.array_equal(left[special], right[special], equal_nan=True)


def finite(array: Array) -> Array:
    """Returns the numbers in double precision, 0 for NaNs and infinities."""
    array = np.asarray(array, np.complex128 if np.iscomplexobj(array) else np.float64)
    return np.where(np.isfinite(array), array, 0)


def spacing_of(array: Any) -> float:
    """Gives the relative spacing of the numbers that an array, or an abstract one, holds."""
    finfo: Any = jnp.finfo
    return float(finfo(array.dtype).eps) if jnp.issubdtype(array.dtype, jnp.inexact) else 0.0


def largest(array: Array) -> float:
    """Returns the largest absolute number, NaNs and infinities left out; 0 for an empty array."""
    return float(np.max(np.abs(finite(array)), initial=0.0))
