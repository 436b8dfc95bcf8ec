"""A result that each replica has for itself, against the value of one device with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distribute_jax.program.checks._compare import (
    Array,
    Verdict,
    compared,
    finite,
    largest,
    same_specials,
)

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
        relative: how much of its size an entry may differ by.
        noise: how much any entry may differ by besides.
    """
    if rows is True or (rows is not False and parts.shape[1:] != one.shape):
        joined = _real_rows(parts, counts)
        if joined is not None and joined.shape == one.shape:
            if compared(joined, one, eps=eps, relative=relative, noise=noise) is Verdict.UNEQUAL:
                return f"its rows differ by up to {largest(finite(joined) - finite(one)):.3g}"
            return None
    if parts.shape[1:] != one.shape:
        return _SHAPES.format(part=parts.shape[1:], one=one.shape)
    if np.array_equal(parts, np.broadcast_to(one, parts.shape)):
        return None
    if not np.issubdtype(one.dtype, np.inexact):
        total = parts.astype(np.float64).sum(0)
        near = np.array_equal(total, one) or np.array_equal(total / len(parts), one)
        return (
            None
            if near
            else _INCOMPARABLE.format(sum=_off(total, one), mean=_off(total / len(parts), one))
        )
    # Sums are as exact as their terms.
    exact = 16 * eps * np.abs(finite(parts)).sum(0) + relative * np.abs(finite(one)) + noise
    with np.errstate(
        invalid="ignore"
    ):  # of infinities of both signs the sum is NaN, as on one device
        total = parts.astype(np.complex128 if np.iscomplexobj(parts) else np.float64).sum(0)
    for value in (total, total / len(parts)):
        if same_specials(value, one) and np.all(np.abs(finite(value) - finite(one)) <= exact):
            return None
    return _INCOMPARABLE.format(sum=_off(total, one), mean=_off(total / len(parts), one))


def _real_rows(parts: Array, counts: Sequence[int] | None) -> Array | None:
    if parts.ndim < 2:
        return None
    if counts is None:
        return parts.reshape(-1, *parts.shape[2:])
    return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])


def _off(value: Array, one: Array) -> str:
    exact = not np.issubdtype(one.dtype, np.inexact)
    return (
        f"{largest(finite(value) - finite(one)):.3g}"
        if exact or same_specials(value, one)
        else "nan"
    )
