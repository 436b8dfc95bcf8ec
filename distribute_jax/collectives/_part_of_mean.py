"""``part_of_mean``: the library's word that a number is one replica's part of a mean over all of them."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

part_of_mean_p: Any = Primitive("part_of_mean")
"""An identity. What the step does with the part before it is summed is looked at when it is traced."""


def part_of_mean(part: jax.Array) -> jax.Array:
    """Marks a part of a mean, which is N times too small until the replicas' parts are summed."""
    marked: jax.Array = part_of_mean_p.bind(part)
    return marked


def _identity(x: Any) -> Any:
    return x


part_of_mean_p.def_impl(_identity)
part_of_mean_p.def_abstract_eval(_identity)
mlir.register_lowering(part_of_mean_p, lambda ctx, x: [x])
batching.primitive_batchers[part_of_mean_p] = lambda xs, dims: (part_of_mean_p.bind(*xs), *dims)
# Gradients are parts as well, and are meant to be: they are summed before they are used.
ad.primitive_jvps[part_of_mean_p] = lambda xs, tangents: (part_of_mean_p.bind(*xs), *tangents)
ad.primitive_transposes[part_of_mean_p] = lambda cotangent, x: [cotangent]
