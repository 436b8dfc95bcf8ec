"""Training is the same on 1, 2, 4 and 8 replicas, partial batches included."""

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
from leaves import assert_close_to_largest

import distribute_jax as dj

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)),
}


def network(dtype: jnp.dtype) -> nnx.Sequential:
    """Two layers."""
    linear = functools.partial(nnx.Linear, param_dtype=dtype, rngs=nnx.Rngs(0))
    return nnx.Sequential(linear(5, 7), nnx.tanh, linear(7, 3))


def train(strategy: dj.Strategy, names: tuple[str, ...], dtype: type):
    """Returns losses, parameters and optimizer state of ten steps over batches of 16, 13 and 1.

    Each optimizer trains a network; all are in one program, which compiles once.
    """
    rng = np.random.default_rng(3)
    sizes = [16, 16, 13, 16, 16, 13, 16, 16, 1, 16]
    batches = [(rng.normal(size=(n, 5)).astype(dtype), rng.integers(0, 3, n)) for n in sizes]
    with strategy.scope():
        models = {name: network(dtype) for name in names}
        optimizers = {
            name: nnx.Optimizer(models[name], OPTIMIZERS[name](), wrt=nnx.Param) for name in names
        }

    def trained(name: str, x: jax.Array, y: jax.Array):
        def loss_fn(model: nnx.Sequential):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return dj.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(models[name])
        grads = dj.get_replica_context().all_reduce("sum", grads)
        optimizers[name].update(models[name], grads)
        return loss

    def step(x: jax.Array, y: jax.Array):
        return {name: trained(name, x, y) for name in names}

    losses: dict[str, list[Any]] = {name: [] for name in names}
    for batch in strategy.distribute_dataset(batches):
        total = strategy.reduce("sum", strategy.run(step, args=batch))
        for name in names:
            losses[name].append(np.asarray(total[name]))
    params = {name: nnx.to_pure_dict(nnx.state(models[name], nnx.Param)) for name in names}
    state = {name: nnx.to_pure_dict(nnx.state(optimizers[name])) for name in names}
    return (
        {name: np.array(each) for name, each in losses.items()},
        jax.tree.map(np.asarray, params),
        jax.tree.map(np.asarray, state),
    )


ALL = tuple(OPTIMIZERS)


@functools.cache
def on_one_device(names: tuple[str, ...], dtype: type):
    """The reference, computed once."""
    return train(dj.OneDeviceStrategy(0), names, dtype)


@pytest.mark.exhaustive
def test_ten_steps_are_those_of_one_device_in_float64(strategy: dj.Strategy):
    with jax.enable_x64(True):
        many = train(strategy, ALL, np.float64)
        one = on_one_device(ALL, np.float64)
    for got, wanted in zip(many, one, strict=True):
        assert_close_to_largest(got, wanted, 1e-10)
    assert {losses.dtype for losses in many[0].values()} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    "names",
    [("clipped",), long(("sgd", "momentum", "adam"))],
    ids=" and ".join,
)
def test_ten_steps_are_those_of_one_device_in_float32(
    strategy: dj.Strategy, names: tuple[str, ...]
):
    many, one = train(strategy, names, np.float32), on_one_device(names, np.float32)
    for name in names:
        np.testing.assert_allclose(many[0][name], one[0][name], rtol=2e-5)
    assert_close_to_largest(many[1], one[1], 1e-4)
    assert_close_to_largest(many[2], one[2], 1e-3)


@pytest.mark.exhaustive
def test_one_device_equals_plain_flax_and_optax():
    """The same ten steps by hand, without this library."""
    with jax.enable_x64(True):
        losses, params, _ = on_one_device(("adam",), np.float64)
        rng = np.random.default_rng(3)
        model = network(np.float64)
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

        @nnx.jit
        def step(model: nnx.Sequential, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array):
            loss, grads = nnx.value_and_grad(
                lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
            )(model)
            optimizer.update(model, grads)
            return loss

        for loss, n in zip(losses["adam"], [16, 16, 13, 16, 16, 13, 16, 16, 1, 16], strict=True):
            x, y = rng.normal(size=(n, 5)), rng.integers(0, 3, n)
            np.testing.assert_allclose(loss, step(model, optimizer, x, y), rtol=1e-12)
        assert_close_to_largest(
            params["adam"], nnx.to_pure_dict(nnx.state(model, nnx.Param)), 1e-12
        )
