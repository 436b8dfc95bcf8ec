"""Copies of state that outlive the next step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax import _context
from distribute_jax._errors import DonatedError
from distribute_jax._messages import is_donated, listed, path_text
from distribute_jax.program._run import one_at_a_time

_GONE = """\
dj.snapshot got arrays that an earlier step has taken, so they cannot be copied any more:
{lines}
Take a snapshot before the step that changes the state: best = dj.snapshot(model). An array read from \
a variable, nnx.clone(model) and jax.tree.map over its state share its memory; none of them is a copy."""


def snapshot(tree: Any) -> Any:
    """Copies the arrays of a model, an optimizer or a pytree, so that no later step reuses their memory.

    ``run`` updates variables in place: it donates their arrays, so that one that was read from a variable
    before a step is gone after it. A snapshot stays. Another thread than that of the steps may take one
    as well: it waits for the step that is being dispatched, and all arrays are of one step.

    Args:
        tree: an NNX object, or a pytree of arrays (global view).

    Returns:
        For an NNX object its ``nnx.State``, which ``nnx.update(model, state)`` puts back; for a pytree
        the pytree. All arrays are copies with the same placement.

    Raises:
        DonatedError: the arrays were donated to a step already.
        RuntimeError: called by a source of batches, in the thread that reads ahead of the loop.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Param(jnp.zeros(2))
        >>> kept = dj.snapshot(model)
        >>> model[...] += 1
        >>> kept[...].tolist(), model[...].tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    _context.require_loop("dj.snapshot")
    with one_at_a_time:  # a step of another thread would take some of the arrays, or hold tracers
        state = nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree
        leaves = jax.tree_util.tree_leaves_with_path(
            state, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        gone = [path_text(path) for path, x in leaves if any(map(is_donated, jax.tree.leaves(x)))]
        if gone:
            raise DonatedError(_GONE.format(lines=listed(gone)))
        return jax.tree.map(_copied, state)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
