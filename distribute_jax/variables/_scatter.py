"""Changes of single rows of a variable, combined over the replicas as one dense change."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError

Combine = Callable[[jax.Array], jax.Array]

SCATTERS: dict[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "min",
    "max": "max", "update": "set",
}  # fmt: skip
"""Each operation, and what JAX calls it."""


def checked_rows(
    indices: Any, updates: jax.Array, shape: tuple[int, ...], method: str
) -> jax.Array:
    """Gives the rows as an array of integers, those of the host seen to be rows of the variable."""
    given = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if not shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ArgumentError(
            f"{method} got indices of dtype {given.dtype} for a variable of shape {shape}. They are "
            "integers, rows along its dim 0: jnp.array([0, 2])."
        )
    wanted = (*given.shape, *shape[1:])
    try:
        fits = jnp.broadcast_shapes(updates.shape, wanted) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise ArgumentError(
            f"{method} got updates of shape {updates.shape} for {given.size} rows of shape {shape[1:]}. Give "
            f"updates of shape {wanted}, or one that broadcasts to it."
        )
    concrete = not isinstance(given, jax.core.Tracer) and given.size > 0
    if concrete and not -shape[0] <= int(np.min(given)) <= int(np.max(given)) < shape[0]:
        raise ArgumentError(
            f"{method} got indices from {int(np.min(given))} to {int(np.max(given))}, and the variable has "
            f"{shape[0]} rows, 0 to {shape[0] - 1}. JAX would leave such rows out silently."
        )
    return jnp.asarray(given)


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
            over the dense changes; factors over the rows that any replica touches, where the
            factors that one replica gives for one row are multiplied first.

    Integers are divided toward zero.
    """
    if over is None:
        if op == "div":
            return _divided(value, jnp.ones_like(value).at[indices].multiply(updates))
        changed: jax.Array = getattr(value.at[indices], SCATTERS[op])(updates)
        return changed
    if op in ("add", "sub"):
        dense = over(jnp.zeros_like(value).at[indices].add(updates))
        return value + dense if op == "add" else value - dense
    own = jnp.zeros_like(value).at[indices].set(1)
    factor = over(jnp.where(own > 0, jnp.ones_like(value).at[indices].multiply(updates), 0))
    touched = over(own) > 0
    factor = jnp.where(touched, factor, 1)
    return value * factor if op == "mul" else _divided(value, factor)


def _divided(value: jax.Array, by: jax.Array) -> jax.Array:
    return jax.lax.div(value, by.astype(value.dtype))


class Scatters:
    """TensorFlow's name for each operation of ``scatter``."""

    @abstractmethod
    def scatter(self, op: str, indices: Any, updates: Any) -> Any:
        """Changes rows of the value."""

    def scatter_add(self, indices: Any, updates: Any) -> Any:
        """Adds to rows; see ``scatter``."""
        return self.scatter("add", indices, updates)

    def scatter_sub(self, indices: Any, updates: Any) -> Any:
        """Subtracts from rows; see ``scatter``."""
        return self.scatter("sub", indices, updates)

    def scatter_mul(self, indices: Any, updates: Any) -> Any:
        """Multiplies rows; see ``scatter``."""
        return self.scatter("mul", indices, updates)

    def scatter_div(self, indices: Any, updates: Any) -> Any:
        """Divides rows; see ``scatter``."""
        return self.scatter("div", indices, updates)

    def scatter_min(self, indices: Any, updates: Any) -> Any:
        """Lowers rows to the updates; see ``scatter``."""
        return self.scatter("min", indices, updates)

    def scatter_max(self, indices: Any, updates: Any) -> Any:
        """Raises rows to the updates; see ``scatter``."""
        return self.scatter("max", indices, updates)

    def scatter_update(self, indices: Any, updates: Any) -> Any:
        """Replaces rows; see ``scatter``."""
        return self.scatter("update", indices, updates)
