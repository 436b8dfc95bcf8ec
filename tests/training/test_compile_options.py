"""Options of ``compile`` that change what is trained: the same on any number of replicas."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Net(nnx.Module):
    """A body with a batch norm, and a head, large enough to be sharded."""

    def __init__(self) -> None:
        self.body = nnx.Linear(4, 1024, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(1024, axis_name="data", rngs=nnx.Rngs(1))
        self.head = nnx.Linear(1024, 1, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.body(x)))


def made(strategy: dj.Strategy, **options: Any) -> dj.Model:
    with strategy.scope():
        model = dj.Model(Net())
    model.compile(optax.adam(0.1), "mse", **options)
    return model


def test_only_what_is_trained_changes_and_has_state(s4: dj.Strategy):
    """The head learns, batch norm keeps its statistics, and Adam has two moments of 1025 weights."""
    model, first = made(s4, trainable="^head"), Net()
    model.fit(X, Y, batch_size=8, verbose=0)
    for layer in ("body", "norm"):
        states = [nnx.state(getattr(module, layer)) for module in (model.module, first)]
        jax.tree.map(np.testing.assert_array_equal, *states)
    assert not np.array_equal(model.module.head.kernel[...], first.head.kernel[...])
    state = jax.tree.leaves(nnx.state(model.optimizer))
    assert sum(leaf.size for leaf in state if leaf.ndim) == 2 * 1025
    assert "1,025 trained parameters" in repr(model)
    lines: list[str] = []
    model.summary(lines.append)
    assert "Trainable: 1,025 parameters" in lines[0]
    assert not model.module.norm.use_running_average


def test_what_selects_no_weight_is_refused():
    """Names without a match, patterns that are none, and what is no filter; predicates select."""
    one = dj.OneDeviceStrategy("cpu:0")
    model = made(one, trainable=lambda path, _: "norm" in path)
    assert "2,048 trained parameters" in repr(model)
    with pytest.raises(dj.ArgumentError, match=r"(?s)selects no weight of:.*head\.kernel"):
        model.compile(trainable="^haed")
    for wrong in ("(", 3):
        with pytest.raises(dj.ArgumentError, match=r"compile\(trainable\) must be a regular expr"):
            model.compile(trainable=wrong)


def test_servers_accumulate_for_an_optimizer_that_chooses_by_norms():
    """Where LAMB chooses with ``jnp.where``, JAX notes the mesh, which does not communicate."""
    weights = []
    for strategy in (
        dj.ParameterServerStrategy(workers=2, servers=2, max_staleness=0),
        dj.OneDeviceStrategy("cpu:0"),
    ):
        with strategy.scope():
            model = dj.Model(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        model.compile(optax.lamb(0.1), "mse", gradient_accumulation_steps=2)
        model.fit(X, Y, batch_size=4, verbose=0)
        weights.append(model.get_weights())
    for weight, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-6)
