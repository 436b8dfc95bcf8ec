"""Optax transformations that are more than a rule for gradients: what works in fit, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(24, 1)
Y = 3 * X


def made(strategy: dj.Strategy, optimizer: Any, **options: Any) -> dj.Model:
    with strategy.scope():
        model = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    model.compile(optimizer, loss="mse", **options)
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_a_transformation_that_needs_more_than_gradients_is_refused(
    s2: dj.Strategy, options: dict[str, Any]
):
    """The error says what to use in fit; nothing is trained."""
    model = made(s2, optax.lbfgs(), **options)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"'value_fn'.*linesearch=None.*ReduceLROnPlateau"):
        model.fit(X, Y, batch_size=4, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.exhaustive
def test_what_the_messages_name_works(s4: dj.Strategy):
    """L-BFGS without a line search, and a rate that a callback lowers."""
    options: dict[str, Any] = {"batch_size": 12, "epochs": 8, "verbose": 0}
    searched = made(s4, optax.lbfgs(learning_rate=0.1, linesearch=None)).fit(X, Y, **options)
    assert searched.history["loss"][-1] < searched.history["loss"][0]
    lowered = made(s4, optax.inject_hyperparams(optax.sgd)(learning_rate=1e-12))
    plateau = dj.callbacks.ReduceLROnPlateau("loss", patience=1, verbose=0)
    lowered.fit(X, Y, callbacks=[plateau], **options)
    assert lowered.learning_rate < 1e-13


@pytest.mark.exhaustive
def test_multi_steps_are_accumulated_gradients(strategy: dj.Strategy):
    """optax's way, as the object or the transformation, moves the weights as ours does."""
    sgd, steps = optax.sgd(0.1, momentum=0.9), optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    models = [
        made(strategy, steps),
        made(strategy, steps.gradient_transformation()),
        made(strategy, sgd, gradient_accumulation_steps=2),
    ]
    for model in models:
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    *found, expected = (np.concatenate([w.ravel() for w in m.get_weights()]) for m in models)
    for weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
