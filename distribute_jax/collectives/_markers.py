"""Identity primitives that mark values for the proofs: mirrored, unreduced, part of a mean, real rows."""

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
    # Tangents and cotangents are not marked: what holds for x need not hold for them.
    ad.primitive_jvps[marker] = lambda xs, tangents: (marker.bind(*xs), list(tangents))
    ad.primitive_transposes[marker] = lambda cotangents, *xs: list(cotangents)
    return marker


mirrored_p = _marker("mirrored")
"""The proof of sync trusts that its results are mirrored."""

unreduced_p = _marker("unreduced")
"""The proof of sync refuses a program in which all of its arrays are mirrored."""

part_of_mean_p = _marker("part_of_mean")
"""The trace of a step is checked for uses of the part before it is summed."""

part_gradient_p = _marker("part_gradient")
"""It marks the tangents and cotangents of parts of means; the trace is checked for means of gradients."""


def _marked(tangents: Sequence[Any]) -> list[Any]:
    return [x if type(x) is ad.Zero else part_gradient_p.bind(x)[0] for x in tangents]


ad.primitive_jvps[part_of_mean_p] = lambda xs, tangents: (
    part_of_mean_p.bind(*xs),
    _marked(tangents),
)
ad.primitive_transposes[part_gradient_p] = lambda cotangents, *xs: _marked(cotangents)

_real_rows_p = _marker("real_rows")
"""Its bools of shape (rows,) are False exactly for rows of padding."""


def assume_mirrored(x: T) -> T:
    """Declares that ``x`` is equal on every replica, if the proof cannot show it.

    The value and its gradients pass through unchanged; nothing is communicated. The declaration is
    not checked in an ordinary run: if the replicas differ, they stay different, and state that depends
    on ``x`` diverges. ``RunOptions(verify="first")`` compares the copies of the state that the step
    returns, bit by bit. To *make* a value equal everywhere, reduce it with
    ``get_replica_context().all_reduce`` instead, which needs no declaration.

    Typical uses: the result of a callback or a custom kernel that returns the same value on every
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
    """Marks arrays that will be summed over the replicas: a mistake if all are already mirrored."""
    return list(unreduced_p.bind(*leaves)) if leaves else []


def part_of_mean(part: jax.Array) -> jax.Array:
    """Marks a part of a mean, which is N times too small until the replicas' parts are summed."""
    return cast("jax.Array", part_of_mean_p.bind(part)[0])


def real_rows(mask: jax.Array) -> jax.Array:
    """Marks the mask of this replica's rows that is False for padding."""
    return cast("jax.Array", _real_rows_p.bind(mask)[0])
