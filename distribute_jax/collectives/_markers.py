"""Primitives that compute nothing and mark a value for the proof: mirrored, unreduced, part of a mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distribute_jax._checks import converting
from distribute_jax._messages import check_int_range

T = TypeVar("T")


def _marker(name: str) -> Any:
    """Returns an identity on several arrays that stays in the trace of a step."""
    marker: Any = Primitive(name)
    marker.multiple_results = True
    marker.def_impl(lambda *xs: list(xs))
    marker.def_abstract_eval(lambda *xs: list(xs))
    mlir.register_lowering(marker, lambda ctx, *xs: list(xs))
    batching.primitive_batchers[marker] = lambda xs, dims: (marker.bind(*xs), dims)
    # Derivatives are not marked: what is known of x need not hold for its tangents and cotangents.
    ad.primitive_jvps[marker] = lambda xs, tangents: (marker.bind(*xs), list(tangents))
    ad.primitive_transposes[marker] = lambda cotangents, *xs: list(cotangents)
    return marker


mirrored_p = _marker("mirrored")
"""Its result is trusted to be mirrored by the proof of ``distribute_jax.program``."""

unreduced_p = _marker("unreduced")
"""The proof refuses a program where all of its arrays are mirrored."""

part_of_mean_p = _marker("part_of_mean")
"""What the step does with the part before it is summed is looked at when it is traced."""

_real_rows_p = _marker("real_rows")
"""Its bools of shape (rows,) are False exactly for the rows that are padding."""


def assume_mirrored(x: T) -> T:
    """Declares that ``x`` is the same on every replica, where the proof cannot show it.

    The value passes through unchanged, and so do its gradients; nothing is communicated. What is
    declared is not checked in an ordinary run: if the replicas do differ, they stay different, and
    state that depends on ``x`` diverges; ``RunOptions(verify="first")`` compares the replicas' copies
    of what the step leaves, bit by bit. To *make* a value the same everywhere, reduce it with
    ``get_replica_context().all_reduce`` instead; no declaration is needed then.

    Typical uses: the result of a callback or a custom kernel that returns the same answer on every
    replica, and a reduction written by hand with ``ppermute``.

    Args:
        x: a pytree of arrays, numbers and tracers.

    Returns:
        The same tree with the same values.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> dj.assume_mirrored({"rate": jnp.float32(0.5)})["rate"]
        Array(0.5, dtype=float32)
    """
    with converting("dj.assume_mirrored: x", x, "a tree of arrays and numbers"):
        same: T = jax.tree.map(
            lambda leaf: mirrored_p.bind(check_int_range(leaf, "dj.assume_mirrored"))[0], x
        )
    return same


def unreduced(leaves: Sequence[Any]) -> list[Any]:
    """Marks arrays that are about to be summed over the replicas: a mistake if all are equal already."""
    return list(unreduced_p.bind(*leaves)) if leaves else []


def part_of_mean(part: jax.Array) -> jax.Array:
    """Marks a part of a mean, which is N times too small until the replicas' parts are summed."""
    return cast("jax.Array", part_of_mean_p.bind(part)[0])


def real_rows(mask: jax.Array) -> jax.Array:
    """Marks a mask of the rows of this replica's share as the one that is False for padding."""
    return cast("jax.Array", _real_rows_p.bind(mask)[0])
