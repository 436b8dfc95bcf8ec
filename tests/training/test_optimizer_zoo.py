"""Transformations of optax train equally on one device, on replicas, and where state is divided."""

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
