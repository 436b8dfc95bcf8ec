"""A result that each replica has for itself, against the value of one device with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distribute_jax.program.checks._compare import Array, Verdict, compared, largest, tolerance

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
    parts: Array, one: Array, *, rows: Any, counts: Sequence[int] | None, eps: float
) -> str | None:
    """Says how the replicas' values of a result differ from that of one device.

    Rows for each example must be the same rows. Other values have no counterpart on one device, only
    their sum has (of parts of a loss, or counts) or their mean (of means over shares alike): one of the
    two must be the value there.

    Args:
        parts: the values, stacked (N, ...).
        one: the value on one device.
        rows: whether it has one row for each example; anything but a bool where that is not known.
        counts: the real rows of each replica, None where all are real.
        eps: the relative spacing of the numbers as the step holds them.
    """
    if rows is True or (rows is not False and parts.shape[1:] != one.shape):
        joined = _real_rows(parts, counts)
        if joined is not None and joined.shape == one.shape:
            return _rows_difference(joined, one, eps)
    if parts.shape[1:] != one.shape:
        return _SHAPES.format(part=parts.shape[1:], one=one.shape)
    if np.array_equal(parts, np.broadcast_to(one, parts.shape)):
        return None
    wide = np.complex128 if np.iscomplexobj(parts) else np.float64
    total = parts.astype(wide).sum(0)
    mean = total / len(parts)
    if _is_near(total, one, parts, eps) or _is_near(mean, one, parts, eps):
        return None
    return _INCOMPARABLE.format(sum=_off(total, one), mean=_off(mean, one))


def _real_rows(parts: Array, counts: Sequence[int] | None) -> Array | None:
    if parts.ndim < 2:
        return None
    if counts is None:
        return parts.reshape(-1, *parts.shape[2:])
    return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])


def _rows_difference(joined: Array, one: Array, eps: float) -> str | None:
    if compared(joined, one, eps=eps) is Verdict.UNEQUAL:
        apart = largest(joined.astype(np.float64) - one) if joined.dtype != bool else 1.0
        return f"its rows differ by up to {apart:.3g}"
    return None


def _off(value: Array, one: Array) -> str:
    alike = not np.issubdtype(one.dtype, np.inexact) or np.array_equal(
        np.isnan(value), np.isnan(one)
    )
    return f"{largest(value - one):.3g}" if alike else "nan"


def _is_near(value: Array, one: Array, parts: Array, eps: float) -> bool:
    """Compares a combined value with that of one device; a sum is as exact as its largest terms."""
    if not np.issubdtype(one.dtype, np.inexact):
        return bool(np.array_equal(value, one))
    if not np.array_equal(np.isnan(value), np.isnan(one)):
        return False
    change = tolerance(eps) * largest(one)
    return largest(value - one) <= change + 16 * eps * largest(np.abs(parts).sum(0))
