"""Keras's optimizers by name, as optax transformations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribute_jax as dj
from distribute_jax.training._keras_optimizers import KERAS, optimizer

WEIGHTS = np.array([[0.01, -0.02], [0.03, 0.005]], np.float32)
GRADIENTS = 1e-3 * np.array([[[1, -2], [3, 4]], [[-5, 1], [2, 2]], [[1, 1], [-4, 6]]], np.float32)

MOVED = {
    "sgd": [3.00007e-5, 0.0, -1.0e-5, -1.2e-4],
    "rmsprop": [1.839157e-4, 2.15929e-4, -2.3522433e-3, -7.0963493e-3],
    "adam": [-6.81933e-5, 1.1913907e-3, -1.9957107e-3, -2.8730463e-3],
    "adamw": [-6.830785e-5, 1.1916216e-3, -1.9960571e-3, -2.8730945e-3],
    "adadelta": [3.0175e-7, -2.4959e-7, -7.1898e-7, -3.85614e-6],
    "adagrad": [9.48552e-6, 0.0, -3.16277e-6, -3.794068e-5],
    "adamax": [-3.6961026e-4, 1.1589155e-3, -1.8465426e-3, -2.4164913e-3],
    "adafactor": [5.35417e-6, 5.12972e-6, -1.163594e-5, -6.282795e-5],
    "nadam": [-2.130568e-4, 2.616514e-4, -9.705108e-4, -2.5055110e-3],
    "lion": [-0.001, -0.001, -0.001, -0.003],
    "lamb": [8.65292e-6, 2.283789e-5, -4.435703e-5, -7.782876e-5],
}
"""How far Keras 3.15.1 moves the weights in three updates with these gradients."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MOVED)
def test_a_name_moves_the_weights_as_keras_does(name: str):
    """Gradients of 1e-3, for which the place of epsilon in Adam is 3% of an update."""
    tx, weights = optimizer(name), jnp.asarray(WEIGHTS)
    state = tx.init(weights)
    for gradient in GRADIENTS:
        updates, state = tx.update(jnp.asarray(gradient), state, weights)
        weights = optax.apply_updates(weights, updates)
    moved = np.asarray(weights - WEIGHTS).ravel()
    np.testing.assert_allclose(moved, MOVED[name], rtol=2e-5, atol=6e-9)


def test_every_name_is_in_the_table():
    assert set(MOVED) == set(KERAS)


def test_a_transformation_without_a_rate_is_returned_and_a_name_is_looked_up_in_any_case():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.fromage(0.1))
    assert optimizer(tx) is tx
    for name in ("Adam", "SGD", "RMSprop"):
        state = optimizer(name).init(jnp.zeros(2))
        assert list(state.hyperparams) == ["learning_rate"], "the only one that is Keras's to set"


@pytest.mark.parametrize("identifier", [None, 0.1, optax.adam])
def test_what_is_no_optimizer_is_refused(identifier: Any):
    with pytest.raises(dj.ArgumentError, match=r"optax.adam\(1e-3\).* adagrad, adam, adamax"):
        optimizer(identifier)
