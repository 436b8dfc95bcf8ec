"""Optax's transformations, and Keras's optimizers by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from model_factory import compile_model, linear

import distribute_jax as dj
from distribute_jax.training._keras_optimizers import KERAS, optimizer

CONTRIB: Any = optax.contrib
RATES = optax.cosine_decay_schedule(0.01, 8)
ZOO: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "adan": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adan(0.01)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "dadapt_adamw": lambda: CONTRIB.dadapt_adamw(1.0),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(RATES),
    "lars": lambda: optax.lars(0.1),
    "lion, clipped by unit": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.lion(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "muon": lambda: CONTRIB.muon(0.01),
    "noisy_sgd": lambda: optax.noisy_sgd(0.01, key=1),
    "prodigy": lambda: CONTRIB.prodigy(0.1),
    "schedule_free": lambda: CONTRIB.schedule_free_adamw(0.01),
    "sm3": lambda: optax.sm3(0.01),
}
LAYOUTS: dict[str, Callable[[], dj.Strategy]] = {
    "replicas_per_device": lambda: dj.MirroredStrategy([0, 1], replicas_per_device=2),
    "shard_optimizer_state": lambda: dj.MirroredStrategy([0, 1], shard_optimizer_state=True),
    "FullyShardedStrategy": lambda: dj.FullyShardedStrategy([0, 1]),
}
X = np.random.default_rng(0).normal(size=(22, 16)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(22, 64)).astype(np.float32)


def loss(model: Any, x: Any, y: Any) -> Any:
    return dj.compute_average_loss(((model(x) - y) ** 2).mean(axis=1))


def trained(strategy: dj.Strategy) -> dict[str, Any]:
    """Trains a layer with each transformation, in one step, on two full batches and a partial one."""
    with strategy.scope():
        models = {name: nnx.Linear(16, 64, rngs=nnx.Rngs(0)) for name in ZOO}
        pairs = [(model, dj.Optimizer(model, ZOO[name]())) for name, model in models.items()]

    def step(x: Any, y: Any) -> None:
        for model, each in pairs:
            each.update(model, nnx.grad(loss)(model, x, y))

    for batch in strategy.distribute_dataset([(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]):
        strategy.run(step, args=batch, options=dj.RunOptions(verify="off"))
    return {name: {"kernel": m.kernel[...], "bias": m.bias[...]} for name, m in models.items()}


@functools.cache
def on_one_device() -> dict[str, Any]:
    return trained(dj.OneDeviceStrategy("cpu:0"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformations_train_as_on_one_device(layout: str):
    """A norm, factor or average over an array is that of the global array, not of a shard."""
    result = trained(LAYOUTS[layout]())
    for name, state in on_one_device().items():
        for key, value in state.items():
            np.testing.assert_allclose(result[name][key], value, 1e-4, 1e-5, err_msg=name)


LINE = np.linspace(-1, 1, 24, dtype=np.float32).reshape(24, 1)
SLOPE = 3 * LINE


def model_of(strategy: dj.Strategy, optimizer: Any, **options: Any) -> dj.Model:
    return compile_model(strategy, linear(1), optimizer=optimizer, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_a_transformation_that_needs_more_than_gradients_is_refused(
    s2: dj.Strategy, options: dict[str, Any]
):
    model = model_of(s2, optax.lbfgs(), **options)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"'value_fn'.*linesearch=None.*ReduceLROnPlateau"):
        model.fit(LINE, SLOPE, batch_size=4, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.exhaustive
def test_the_suggestions_of_the_messages_work(s4: dj.Strategy):
    options: dict[str, Any] = {"batch_size": 12, "epochs": 8, "verbose": 0}
    searched = model_of(s4, optax.lbfgs(learning_rate=0.1, linesearch=None)).fit(
        LINE, SLOPE, **options
    )
    assert searched.history["loss"][-1] < searched.history["loss"][0]
    lowered = model_of(s4, optax.inject_hyperparams(optax.sgd)(learning_rate=1e-12))
    plateau = dj.callbacks.ReduceLROnPlateau("loss", patience=1, verbose=0)
    lowered.fit(LINE, SLOPE, callbacks=[plateau], **options)
    assert lowered.learning_rate < 1e-13


@pytest.mark.exhaustive
def test_multi_steps_equal_accumulated_gradients(strategy: dj.Strategy):
    sgd, steps = optax.sgd(0.1, momentum=0.9), optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    models = [
        model_of(strategy, steps),
        model_of(strategy, steps.gradient_transformation()),
        model_of(strategy, sgd, gradient_accumulation_steps=2),
    ]
    for model in models:
        model.fit(LINE, SLOPE, batch_size=8, epochs=2, shuffle=False, verbose=0)
    *found, expected = (np.concatenate([w.ravel() for w in m.get_weights()]) for m in models)
    for weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "option", [{"gradient_accumulation_steps": 2}, long({"skip_nonfinite": True})]
)
def test_a_mask_leaves_weights_out_of_an_update_that_may_be_skipped(
    strategy: dj.Strategy, option: dict[str, Any]
):
    """A weight that is left out has a state without arrays, which the update under a ``cond`` rebuilds."""
    parts = {"train": optax.sgd(0.1, momentum=0.9), "keep": optax.set_to_zero()}
    labels = functools.partial(jax.tree.map, lambda w: "train" if w.ndim == 2 else "keep")
    histories = []
    for model in (
        model_of(strategy, optax.partition(parts, labels), **option),
        model_of(strategy, optax.sgd(0.1, momentum=0.9), trainable="kernel", **option),
    ):
        history = model.fit(LINE, SLOPE, batch_size=8, epochs=2, shuffle=False, verbose=0)
        histories.append(history.history["loss"])
    np.testing.assert_allclose(*histories, rtol=1e-6)


@pytest.mark.parametrize(
    "option", [{"skip_nonfinite": True}, long({"dtype_policy": "mixed_float16"})]
)
def test_a_list_of_accumulators_for_a_weight_stays_one_in_an_update_that_may_be_skipped(
    s2: dj.Strategy, option: dict[str, Any]
):
    models = [model_of(s2, optax.sm3(0.1)), model_of(s2, optax.sm3(0.1), **option)]
    histories = [
        model.fit(LINE, SLOPE, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        for model in models
    ]
    np.testing.assert_allclose(*histories, rtol=1e-2 if "dtype_policy" in option else 1e-6)


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
    """With gradients of 1e-3 the place of epsilon in Adam is 3% of an update."""
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
def test_other_objects_are_refused(identifier: Any):
    with pytest.raises(dj.ArgumentError, match=r"optax.adam\(1e-3\).* adagrad, adam, adamax"):
        optimizer(identifier)
