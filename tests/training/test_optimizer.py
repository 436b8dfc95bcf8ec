"""``dj.Optimizer``, which sums gradients over the replicas."""

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
from leaves import assert_close, assert_same_bits

import distribute_jax as dj

TRANSFORMS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.5, momentum=0.9)),
}


class Net(nnx.Module):
    """A layer, and one that the step does not use."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 2, rngs=rngs)
        self.unused = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(n, 3)).astype("f4"), rng.normal(size=(n, 2)).astype("f4"))
        for n in (16, 16, 13)
    ]


def trained(
    strategy: dj.Strategy, make: Callable[..., Any], *, explicit: bool
) -> dict[str, list[Any]]:
    """Trains a model with each transformation; returns parameters and optimizer state of each."""
    with strategy.scope():
        models = {name: Net(nnx.Rngs(0)) for name in TRANSFORMS}
        optimizers = {name: make(models[name], tx()) for name, tx in TRANSFORMS.items()}

    def train(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(((model(x) - y) ** 2).sum(-1))
        )(model)
        if explicit:
            grads = dj.get_replica_context().all_reduce("sum", grads)
        optimizer.update(model, grads)
        return loss

    # All in one program, which compiles once.
    def step(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        return [train(models[name], optimizers[name], x, y) for name in TRANSFORMS]

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, args=batch)
    states = {
        name: jax.tree.leaves((nnx.state(models[name]), nnx.state(optimizers[name])))
        for name in TRANSFORMS
    }
    return {name: [np.asarray(leaf) for leaf in state] for name, state in states.items()}


@functools.cache
def on_one_device() -> dict[str, list[Any]]:
    return trained(dj.OneDeviceStrategy("cpu:0"), dj.Optimizer, explicit=False)


@pytest.mark.exhaustive
def test_it_equals_an_explicit_sum_and_one_device(strategy: dj.Strategy):
    """Bitwise the explicit sum, and to rounding one device."""
    usual = functools.partial(nnx.Optimizer, wrt=nnx.Param)
    ours = trained(strategy, dj.Optimizer, explicit=False)
    theirs = trained(strategy, usual, explicit=True)
    assert_same_bits(ours, theirs)
    assert_close(ours, on_one_device(), rtol=1e-4, atol=1e-6)


def prepared(strategy: dj.Strategy) -> tuple[Net, dj.Optimizer, Any]:
    """A model, its optimizer and the first batch."""
    with strategy.scope():
        model = Net(nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.sgd(0.1))
    return model, optimizer, next(iter(strategy.distribute_dataset(batches())))


def _step_with(optimizer: Any, model: Any, *, reduce: bool, skip: bool) -> Callable[..., None]:
    def step(x: jax.Array, y: jax.Array) -> None:
        grads = nnx.grad(lambda m: dj.compute_average_loss(((m(x) - y) ** 2).sum(-1)))(model)
        if reduce:
            grads = dj.get_replica_context().all_reduce("sum", grads)
        optimizer.update(model, grads, skip_gradients_aggregation=skip)

    return step


def test_gradients_that_were_summed_already_are_refused(strategy: dj.Strategy):
    model, optimizer, batch = prepared(strategy)
    step = _step_with(optimizer, model, reduce=True, skip=False)
    if strategy.num_replicas_in_sync == 1:
        strategy.run(step, args=batch)
        return
    with pytest.raises(dj.OutOfSyncError, match="skip_gradients_aggregation=True") as caught:
        strategy.run(step, args=batch)
    assert "test_optimizer.py" in str(caught.value)
    before = model.layer.bias[...].tolist()
    strategy.run(_step_with(optimizer, model, reduce=True, skip=True), args=batch)
    assert model.layer.bias[...].tolist() != before


def test_unreduced_gradients_with_skip_are_refused(s2: dj.MirroredStrategy):
    model, optimizer, batch = prepared(s2)
    with pytest.raises(dj.OutOfSyncError, match=r"model\.layer"):
        s2.run(_step_with(optimizer, model, reduce=False, skip=True), args=batch)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_gradients_of_frozen_weights_are_zeros_and_are_summed(strategy: dj.Strategy, wrap: Any):
    """Zeros are equal on every replica, and so is their sum; another constant would be counted N times."""
    model, optimizer, batch = prepared(strategy)

    def step(x: jax.Array, y: jax.Array, penalty: bool = False) -> None:
        graphdef, state = nnx.split(model)

        def loss(state: Any) -> jax.Array:
            net = nnx.merge(graphdef, state, copy=True)
            errors = ((jax.lax.stop_gradient(net(x)) - y) ** 2).sum(-1)
            return dj.compute_average_loss(errors) + penalty * sum(
                jnp.sum(leaf) for leaf in jax.tree.leaves(state)
            )

        optimizer.update(model, wrap(jax.grad(loss))(state))

    before = model.layer.kernel[...].tolist()
    strategy.run(step, args=batch)
    assert model.layer.kernel[...].tolist() == before
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(dj.OutOfSyncError, match="already equal on every replica"):
            strategy.run(step, args=(*batch, True))


def test_outside_run_it_equals_nnx_optimizer():
    model, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    ours = dj.Optimizer(model, optax.sgd(0.1))
    theirs = nnx.Optimizer(twin, optax.sgd(0.1), wrt=nnx.Param)
    grads = jax.tree.map(np.ones_like, nnx.state(model, nnx.Param))
    for m, optimizer in ((model, ours), (twin, theirs)):
        optimizer.update(m, grads)
    np.testing.assert_array_equal(model.layer.kernel[...], twin.layer.kernel[...])


@pytest.mark.parametrize("wrap", ["scan", "jit"])
def test_gradients_from_scan_and_jit_are_summed(s2: dj.MirroredStrategy, wrap: str):
    model, optimizer, batch = prepared(s2)

    def loss(m: Net, x: jax.Array, y: jax.Array) -> jax.Array:
        return dj.compute_average_loss(((m(x) - y) ** 2).sum(-1))

    def step(x: jax.Array, y: jax.Array) -> None:
        if wrap == "jit":
            grads = nnx.jit(nnx.grad(loss))(model, x, y)
        else:
            graphdef, state = nnx.split(model)

            def body(total: Any, micro: Any) -> Any:
                one = jax.grad(lambda s: loss(nnx.merge(graphdef, s, copy=True), *micro))(state)
                return jax.tree.map(jnp.add, total, one), None

            micro = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), (x, y))
            zeros = jax.tree.map(jnp.zeros_like, state)
            grads, _ = jax.lax.scan(body, zeros, micro)
        optimizer.update(model, grads)

    before = model.layer.bias[...].tolist()
    s2.run(step, args=batch)
    assert model.layer.bias[...].tolist() != before
