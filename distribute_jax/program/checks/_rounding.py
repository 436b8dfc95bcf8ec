"""Is a difference nothing but rounding errors? The last digits of a step's inputs tell.

The gradient of a number on which the loss does not depend, such as the bias of an attention's keys, is
the rest of a sum that should be 0. Another order of the sum makes it another number of no less size, and
Adam makes steps of nearly its full size of it, so that comparing sizes does not find it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import outside_mesh
from distribute_jax.program._entry import Entry
from distribute_jax.program.checks._compare import (
    Array,
    finite,
    largest,
    same_specials,
    spacing_of,
)

AS_LARGE = 8
"""So many times the change by the last digits of the inputs is still taken for rounding."""


def nudged_outcomes(entry: Entry, flat: Sequence[Any]) -> list[list[Any]]:
    """Runs a program on inputs that are changed in the last digit, up and down.

    It is the last digit of the least precise numbers that the program computes with. By what its own
    input was changed, the state that comes out is changed back: what the step adds to it is looked at.
    """
    spacing = coarsest(entry.program.traced.jaxpr.jaxpr)
    old = range(entry.state_size)
    return [nudged_outcome(entry.execute, flat, sign * spacing, old) for sign in (1, -1)]


def nudged_outcome(
    run: Callable[[list[Any]], list[Any]],
    flat: Sequence[Any],
    change: float,
    old: Sequence[int | None],
) -> list[Any]:
    """Runs a program on inputs that are changed by a relative ``change``.

    Args:
        run: the program.
        flat: its inputs.
        change: how much they are changed.
        old: for the first outputs, the input that each is the new value of, where it is of one.
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
            out if by is None else _changed(_less, out, by)
            for out, by in zip(outs, moved, strict=False)
        ]
    return [*back, *outs[len(back) :]]


def is_rounding(left: Array, right: Array, nudged: Iterable[Array]) -> bool:
    """Whether two outcomes are no further apart than the last digits of the inputs make them.

    Args:
        left: one outcome.
        right: the other.
        nudged: the first as ``nudged_outcomes`` gives it.
    """
    if not np.issubdtype(left.dtype, np.inexact) or not same_specials(left, right):
        return False
    return largest(finite(left) - finite(right)) <= noise_of(left, nudged)


def noise_of(array: Array, nudged: Iterable[Array]) -> float:
    """Returns how much of a difference from an outcome is taken for rounding."""
    return AS_LARGE * max((largest(finite(array) - finite(n)) for n in nudged), default=0.0)


def _nudged(x: Any, change: float) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if not _is_inexact(x):
        return jnp.copy(x)
    size = max(abs(change), spacing_of(x))
    return _changed(lambda x: x * (1 + math.copysign(size, change)), x)


def _moved(new: Any, old: Any) -> Any:
    np_or_jnp: Any = np if isinstance(old, np.ndarray) else jnp
    return np_or_jnp.where(np_or_jnp.isfinite(old), new - old, 0)


def _less(out: Any, by: Any) -> Any:
    return out - by


def _changed(change: Callable[..., Any], x: jax.Array, *more: jax.Array) -> jax.Array:
    """Applies a function of arrays on the host, where nothing is compiled for each shape."""
    if not all(array.is_fully_addressable for array in (x, *more)):
        return jnp.asarray(change(x, *more), x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        new = np.asarray(change(*map(np.asarray, (x, *more)))).astype(x.dtype)
    there: jax.Array = jax.device_put(new, x.sharding)
    return there


def _is_inexact(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def coarsest(jaxpr: jex_core.Jaxpr) -> float:
    """Returns the relative spacing of the least precise numbers that a program computes with."""
    own = [
        spacing_of(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "dtype")
    ]
    return max([0.0, *own, *map(coarsest, jex_core.subjaxprs(jaxpr))])
