"""The promise: the same training on 1, 2, 4 and 8 replicas, partial batches included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)),
}


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 7, param_dtype=dtype, rngs=rngs)
        self.second = nnx.Linear(7, 3, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def train(
    strategy: dj.Strategy, optimizer_name: str, dtype: type, options: dj.RunOptions | None = None
):
    """Ten steps over batches of 16 with a partial one of 13 each third; gives all that was computed."""
    rng = np.random.default_rng(3)
    sizes = [16, 16, 13, 16, 16, 13, 16, 16, 1, 16]
    batches = [(rng.normal(size=(n, 5)).astype(dtype), rng.integers(0, 3, n)) for n in sizes]
    with strategy.scope():
        model = Net(dtype, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OPTIMIZERS[optimizer_name](), wrt=nnx.Param)

    def step(x: jax.Array, y: jax.Array):
        def loss_fn(model: Net):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return dj.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=batch, options=options)))
        for batch in strategy.distribute_dataset(batches)
    ]
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(optimizer)))
    return np.array(losses), params, state


@functools.cache
def on_one_device(optimizer_name: str, dtype: type):
    """The reference, computed once for each process."""
    return train(dj.OneDeviceStrategy(0), optimizer_name, dtype)


def assert_close(a: object, b: object, rtol: float) -> None:
    """Compares two nests, relative to the largest value of each leaf."""
    for (path, x), (_, y) in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b), strict=True
    ):
        scale = max(np.abs(x).max(initial=0.0), 1e-30)
        assert np.abs(x - y).max(initial=0.0) <= rtol * scale, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_ten_steps_are_those_of_one_device_in_float64(strategy: dj.Strategy, name: str):
    with jax.enable_x64(True):
        many = train(strategy, name, np.float64)
        one = on_one_device(name, np.float64)
    for got, wanted in zip(many, one, strict=True):
        assert_close(got, wanted, 1e-10)
    assert many[0].dtype == np.float64


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_ten_steps_are_those_of_one_device_in_float32(strategy: dj.Strategy, name: str):
    many = train(strategy, name, np.float32)
    one = on_one_device(name, np.float32)
    np.testing.assert_allclose(many[0], one[0], rtol=2e-5)
    assert_close(many[1], one[1], 1e-4)
    assert_close(many[2], one[2], 1e-3)


def test_one_device_equals_plain_flax_and_optax():
    """The reference itself is right: the same ten steps by hand, without this library."""
    with jax.enable_x64(True):
        losses, params, _ = on_one_device("adam", np.float64)
        rng = np.random.default_rng(3)
        model = Net(np.float64, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        for loss, n in zip(losses, [16, 16, 13, 16, 16, 13, 16, 16, 1, 16], strict=True):
            x, y = rng.normal(size=(n, 5)), rng.integers(0, 3, n)

            def loss_fn(model: Net, x: jax.Array = x, y: jax.Array = y):
                return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

            wanted, grads = nnx.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            np.testing.assert_allclose(loss, wanted, rtol=1e-12)
        assert_close(params, nnx.to_pure_dict(nnx.state(model, nnx.Param)), 1e-12)


@pytest.mark.parametrize("lowering", ["vmap", "pmap"])
def test_the_other_lowerings_train_alike(strategy: dj.Strategy, lowering: Any):
    usual = train(strategy, "adam", np.float32)
    other = train(strategy, "adam", np.float32, dj.RunOptions(lowering=lowering))
    np.testing.assert_allclose(usual[0], other[0], rtol=1e-6)
    assert_close(usual[1], other[1], 1e-6)


@pytest.mark.parametrize("lowering", ["shard_map", "vmap", "pmap"])
@pytest.mark.parametrize("replicas", [1, 4])
def test_central_storage_trains_as_one_device(replicas: int, lowering: Any):
    strategy = dj.CentralStorageStrategy(list(range(replicas)), parameter_device=7)
    many = train(strategy, "adam", np.float32, dj.RunOptions(lowering=lowering))
    one = on_one_device("adam", np.float32)
    np.testing.assert_allclose(many[0], one[0], rtol=2e-5)
    assert_close(many[1], one[1], 1e-4)
    assert_close(many[2], one[2], 1e-3)
