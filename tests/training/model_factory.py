"""Makes and compiles models for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import distribute_jax as dj


class Scale(nnx.Module):
    """y = w * x, with w = 1."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((1,)))

    def __call__(self, x: Any) -> Any:
        return x * self.w[...]


class Net(nnx.Module):
    """Logits of two classes."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> Any:
        return self.layer(x)


def linear(features: int, *, use_bias: bool = True) -> Callable[[], nnx.Module]:
    return lambda: nnx.Linear(features, 1, use_bias=use_bias, rngs=nnx.Rngs(0))


def compile_model(
    strategy: dj.Strategy,
    make_module: Callable[[], Any],
    kind: type[dj.Model] = dj.Model,
    **options: Any,
) -> Any:
    """Returns a model of a module made in the scope; by default with SGD and the mean squared error."""
    with strategy.scope():
        model = kind(make_module())
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
    return model
