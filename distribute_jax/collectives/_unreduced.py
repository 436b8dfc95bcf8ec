"""``unreduced``: the library's word that values should still differ between the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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


def _identity(*xs: Any) -> list[Any]:
    return list(xs)


unreduced_p.def_impl(_identity)
unreduced_p.def_abstract_eval(_identity)
mlir.register_lowering(unreduced_p, lambda ctx, *xs: list(xs))
batching.primitive_batchers[unreduced_p] = lambda xs, dims: (unreduced_p.bind(*xs), dims)
ad.primitive_jvps[unreduced_p] = lambda xs, tangents: (unreduced_p.bind(*xs), list(tangents))
ad.primitive_transposes[unreduced_p] = lambda cotangents, *xs: list(cotangents)
