"""Primitives that compute nothing and mark a value for the proof: mirrored, unreduced, part of a mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distribute_jax._messages import check_int_range

T = TypeVar("T")

mirrored_p: Any = Primitive("mirrored")
"""An identity whose result the proof of ``distribute_jax.program`` trusts to be mirrored."""


def assume_mirrored(x: T) -> T:
    """Declare that ``x`` is the same on every replica, where the proof cannot see it.

    The value passes through unchanged, and so do its gradients; nothing is communicated. What is
    declared is not checked in an ordinary run: if the replicas do differ, they stay different, and
    state that depends on ``x`` drifts apart; ``RunOptions(verify="first")`` compares the replicas' copies
    of what the step leaves, bit by bit. To *make* a value the same everywhere, reduce it with
    ``get_replica_context().all_reduce`` instead; no declaration is needed then.

    Typical uses: the result of a callback or a custom kernel that gives every replica the same
    answer, and a reduction written by hand with ``ppermute``.

    Args:
        x: A pytree of arrays, numbers and tracers.

    Returns:
        The same tree with the same values.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> dj.assume_mirrored({"rate": jnp.float32(0.5)})["rate"]
        Array(0.5, dtype=float32)
    """
    same: T = jax.tree.map(
        lambda leaf: mirrored_p.bind(check_int_range(leaf, "dj.assume_mirrored")), x
    )
    return same


def _identity(x: Any) -> Any:
    return x


mirrored_p.def_impl(_identity)
mirrored_p.def_abstract_eval(_identity)
mlir.register_lowering(mirrored_p, lambda ctx, x: [x])
batching.primitive_batchers[mirrored_p] = lambda xs, dims: (mirrored_p.bind(*xs), *dims)
# Derivatives pass by the primitive: the user spoke of x, not of its tangents and cotangents.
ad.primitive_jvps[mirrored_p] = lambda xs, tangents: (mirrored_p.bind(*xs), *tangents)
ad.primitive_transposes[mirrored_p] = lambda cotangent, x: [cotangent]


unreduced_p: Any = Primitive("unreduced")
"""An identity on several arrays. The proof refuses a program where all of them are mirrored."""
unreduced_p.multiple_results = True


def unreduced(leaves: Sequence[Any]) -> list[Any]:
    """Marks arrays that are about to be summed over the replicas.

    Summing what is equal already gives N times too much, on every replica alike. One array that
    differs is enough: the gradients of weights that a step does not use are zeros everywhere.
    """
    marked: list[Any] = unreduced_p.bind(*leaves) if leaves else []
    return marked


def _identities(*xs: Any) -> list[Any]:
    return list(xs)


unreduced_p.def_impl(_identities)
unreduced_p.def_abstract_eval(_identities)
mlir.register_lowering(unreduced_p, lambda ctx, *xs: list(xs))
batching.primitive_batchers[unreduced_p] = lambda xs, dims: (unreduced_p.bind(*xs), dims)
ad.primitive_jvps[unreduced_p] = lambda xs, tangents: (unreduced_p.bind(*xs), list(tangents))
ad.primitive_transposes[unreduced_p] = lambda cotangents, *xs: list(cotangents)


part_of_mean_p: Any = Primitive("part_of_mean")
"""An identity. What the step does with the part before it is summed is looked at when it is traced."""


def part_of_mean(part: jax.Array) -> jax.Array:
    """Marks a part of a mean, which is N times too small until the replicas' parts are summed."""
    marked: jax.Array = part_of_mean_p.bind(part)
    return marked


part_of_mean_p.def_impl(_identity)
part_of_mean_p.def_abstract_eval(_identity)
mlir.register_lowering(part_of_mean_p, lambda ctx, x: [x])
batching.primitive_batchers[part_of_mean_p] = lambda xs, dims: (part_of_mean_p.bind(*xs), *dims)
# Gradients are parts as well, and are meant to be: they are summed before they are used.
ad.primitive_jvps[part_of_mean_p] = lambda xs, tangents: (part_of_mean_p.bind(*xs), *tangents)
ad.primitive_transposes[part_of_mean_p] = lambda cotangent, x: [cotangent]


real_rows_p: Any = Primitive("real_rows")
"""An identity on bools of shape (rows,), which are False exactly for the rows that are padding."""


def real_rows(mask: jax.Array) -> jax.Array:
    """Marks a mask of the rows of this replica's share as the one that is False for padding."""
    marked: jax.Array = real_rows_p.bind(mask)
    return marked


real_rows_p.def_impl(_identity)
real_rows_p.def_abstract_eval(_identity)
mlir.register_lowering(real_rows_p, lambda ctx, mask: [mask])
batching.primitive_batchers[real_rows_p] = lambda masks, dims: (masks[0], *dims)
