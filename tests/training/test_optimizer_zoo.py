"""Transformations of optax: equal on one device, replicas and divided state; those of more than gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

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
LAYOUTS: list[tuple[Callable[..., dj.Strategy], dict[str, Any]]] = [
    (dj.MirroredStrategy, {"replicas_per_device": 2}),
    (dj.MirroredStrategy, {"shard_optimizer_state": True}),
    (dj.FullyShardedStrategy, {}),
]
X = np.random.default_rng(0).normal(size=(22, 16)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(22, 64)).astype(np.float32)


def loss(model: Any, x: Any, y: Any) -> Any:
    return dj.compute_average_loss(((model(x) - y) ** 2).mean(axis=1))


def trained(strategy: dj.Strategy) -> dict[str, Any]:
    """Trains a layer by each transformation, in one step, on two full batches and a partial one."""
    with strategy.scope():
        models = {name: nnx.Linear(16, 64, rngs=nnx.Rngs(0)) for name in ZOO}
        pairs = [(models[name], dj.Optimizer(models[name], make())) for name, make in ZOO.items()]

    def step(x: Any, y: Any) -> None:
        for model, optimizer in pairs:
            optimizer.update(model, nnx.grad(loss)(model, x, y))

    for batch in strategy.distribute_dataset([(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]):
        strategy.run(step, args=batch, options=dj.RunOptions(verify="off"))
    return {name: {"kernel": m.kernel[...], "bias": m.bias[...]} for name, m in models.items()}


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    return trained(dj.OneDeviceStrategy("cpu:0"))


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in LAYOUTS[:2]), LAYOUTS[2]],
    ids=["replicas_per_device", "shard_optimizer_state", "FullyShardedStrategy"],
)
def test_transformations_train_as_on_one_device(layout: Any, on_one_device: dict[str, Any]):
    """A norm, a factor or an average over all of an array is that of the array, not of a device's part."""
    make, options = layout
    result = trained(make(range(2), **options))
    for name, state in on_one_device.items():
        for key, value in state.items():
            np.testing.assert_allclose(result[name][key], value, 1e-4, 1e-5, err_msg=name)


LINE = np.linspace(-1, 1, 24, dtype=np.float32).reshape(24, 1)
SLOPE = 3 * LINE


def model_of(strategy: dj.Strategy, optimizer: Any, **options: Any) -> dj.Model:
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
    model = model_of(s2, optax.lbfgs(), **options)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"'value_fn'.*linesearch=None.*ReduceLROnPlateau"):
        model.fit(LINE, SLOPE, batch_size=4, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.exhaustive
def test_what_the_messages_name_works(s4: dj.Strategy):
    """L-BFGS without a line search, and a rate that a callback lowers."""
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
def test_multi_steps_are_accumulated_gradients(strategy: dj.Strategy):
    """optax's way, as the object or the transformation, moves the weights as ours does."""
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
