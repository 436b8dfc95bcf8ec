"""Changes of single rows of a variable, combined over the replicas as one dense change."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Combine = Callable[[jax.Array], jax.Array]

SCATTERS: dict[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "min",
    "max": "max", "update": "set",
}  # fmt: skip
"""Each operation, and what JAX calls it."""


def scattered(
    value: jax.Array, op: str, indices: jax.Array, updates: jax.Array, over: Combine | None
) -> jax.Array:
    """Gives the value after the rows were changed.

    Args:
        value: the whole value.
        op: a key of ``SCATTERS``.
        indices: the rows.
        updates: what to add, multiply by, or put there.
        over: combines the replicas' changes, or None where there is one change only. Sums are taken
            over the dense changes; factors over the rows that any replica touches.
    """
    if over is None:
        changed: jax.Array = getattr(value.at[indices], SCATTERS[op])(updates)
        return changed
    dense = over(jnp.zeros_like(value).at[indices].add(updates))
    if op in ("add", "sub"):
        return value + dense if op == "add" else value - dense
    touched = over(jnp.zeros_like(value).at[indices].set(1)) > 0
    factor = dense if op == "mul" else 1 / dense
    return jnp.where(touched, value * factor, value).astype(value.dtype)
