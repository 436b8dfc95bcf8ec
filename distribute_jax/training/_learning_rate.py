"""Reads and sets the learning rate that an optimizer keeps as state."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import put


def learning_rate(optimizer: nnx.Pytree) -> float:
    """Returns the rate that the next update uses; of a schedule, the one that the last update used."""
    return float(np.asarray(_variable(optimizer)[...]))


def set_learning_rate(optimizer: nnx.Pytree, rate: float) -> None:
    """Sets the rate on the devices where it is, so that the compiled step needs no other."""
    variable = _variable(optimizer)
    if _find(optimizer, "hyperparams_states"):
        raise ArgumentError(
            "The learning rate of this optimizer follows a schedule, which sets it at each update, so it "
            "cannot be set. Compile with a number, as optax.adam(1e-3), to set it, or leave out the callback "
            "that sets it."
        )
    old = variable.get_raw_value()
    value = jnp.asarray(rate, old.dtype)
    variable.set_raw_value(put(np.asarray(value), old.sharding))


def _variable(optimizer: nnx.Pytree) -> Any:
    variables = _find(optimizer, "hyperparams")
    if len(variables) != 1:
        raise ArgumentError(
            "The learning rate of this optimizer is not part of its state, so it can be neither read nor "
            "set. Compile with optax.adam(1e-3) or another optimizer of optax or chain of them, with Keras's "
            'name, as optimizer="adam", or with optax.inject_hyperparams(make)(learning_rate=1e-3), where '
            "make(learning_rate) returns your transformation."
        )
    return variables[0]


def _find(optimizer: nnx.Pytree, kind: str) -> list[Any]:
    return [
        variable
        for path, variable in nnx.iter_graph(optimizer)
        if isinstance(variable, nnx.Variable)
        and kind in path
        and path[path.index(kind) + 1 :][:1] == ("learning_rate",)
    ]
