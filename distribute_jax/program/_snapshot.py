"""Copies of state that outlive the next step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def snapshot(tree: Any) -> Any:
    """Copies the arrays of a model, an optimizer or a nest, so that later steps cannot take them.

    ``run`` updates variables in place: an array that was read from a variable before a step is given
    to that step. A snapshot stays.

    Args:
        tree: an NNX object, or a nest of arrays (global view).

    Returns:
        For an NNX object its ``nnx.State``, which ``nnx.update(model, state)`` puts back; for a nest
        the nest. All arrays are copies with the same placement.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Param(jnp.zeros(2))
        >>> kept = dj.snapshot(model)
        >>> model[...] += 1
        >>> kept[...].tolist(), model[...].tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    state = nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree
    return jax.tree.map(_copied, state)


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
