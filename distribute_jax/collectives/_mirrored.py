"""``assume_mirrored``: the user's word that a value is the same on every replica."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distribute_jax._fitting import fitting

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
    same: T = jax.tree.map(lambda leaf: mirrored_p.bind(fitting(leaf, "dj.assume_mirrored")), x)
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
