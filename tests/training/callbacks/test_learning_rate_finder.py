"""``LearningRateFinder``: a rate for each batch, and everything as before."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Noisy(nnx.Module):
    """Draws random numbers, which replicas share."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.rngs = dj.same_on_all_replicas(nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x) + 1e-3 * jax.random.normal(self.rngs(), ())


def searched(strategy: dj.Strategy, **options: Any) -> dj.callbacks.LearningRateFinder:
    """Returns a finder after a search, which has left all state as it was."""
    with strategy.scope():
        model = dj.Model(Noisy())
    model.compile((optax.adam if options else optax.sgd)(0.123), "mse", **options)
    if options:
        model.fit(X, Y, batch_size=8, verbose=0)
    nodes = [model.module, model.optimizer]
    before = jax.tree.leaves([dj.snapshot(node) for node in nodes])
    finder = dj.callbacks.LearningRateFinder(1e-5, 100.0, 40)
    model.fit(X, Y, batch_size=8, epochs=20, callbacks=[finder], verbose=0)
    after = jax.tree.leaves([dj.snapshot(node) for node in nodes])
    for old, new in zip(before, after, strict=True):
        assert jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key) or np.array_equal(old, new)
    return finder


def test_rates_grow_until_the_loss_does(s2: dj.Strategy):
    """The search ends where SGD leaves the minimum; suggested is a rate before, at which the loss falls."""
    finder = searched(s2)
    tried = len(finder.rates)
    assert tried < 40
    np.testing.assert_allclose(finder.rates, np.geomspace(1e-5, 100, 40)[:tried], rtol=1e-5)
    lowest = min(finder.losses[10:])
    assert finder.losses[-1] > 4 * lowest > max(finder.losses[10:-1])
    at = finder.rates.index(finder.suggestion)
    assert 10 <= at < finder.losses.index(lowest)


def test_too_few_batches_and_wrong_rates():
    """A warning says how many rates were tried; rates that fall and schedules are refused."""
    model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    finder = dj.callbacks.LearningRateFinder()
    with pytest.warns(UserWarning, match="tried 2 of 100 rates"):
        model.fit(X, Y, batch_size=8, callbacks=[finder], verbose=0)
    assert finder.suggestion is None
    assert model.learning_rate == pytest.approx(0.01)
    with pytest.raises(dj.ArgumentError, match="max_lr must be a number >= "):
        dj.callbacks.LearningRateFinder(min_lr=0.1, max_lr=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "skip_nonfinite": True},
        {"gradient_accumulation_steps": 2, "trainable": "layer"},
    ],
    ids=["averages", "accumulated"],
)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kind", [dj.MirroredStrategy, dj.FullyShardedStrategy])
def test_losses_are_those_of_one_device(kind: Any, devices: int, options: dict[str, Any]):
    """At every rate, whatever else the optimizer keeps."""
    finders = [
        searched(s, **options) for s in (kind(range(devices)), dj.OneDeviceStrategy("cpu:0"))
    ]
    assert finders[0].rates == finders[1].rates
    np.testing.assert_allclose(finders[0].losses, finders[1].losses, rtol=1e-3)
    assert finders[0].suggestion == finders[1].suggestion
