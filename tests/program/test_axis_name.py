"""``axis_name``: the user's name for the axis of the replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import linen, nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def normed(axis: str) -> nnx.Sequential:
    """A layer with synchronised batch norm."""
    rngs = nnx.Rngs(0)
    norm = nnx.BatchNorm(4, axis_name=axis, rngs=rngs)
    return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), norm, nnx.relu)


def trained(strategy: dj.Strategy, axis: str, options: dj.RunOptions | None = None) -> list[Any]:
    """Returns the results of two steps with collectives inside scan, cond, jit, checkpoint and grad."""
    with strategy.scope():
        net = normed(axis)
        optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    def step(x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        optimizer.update(net, jax.lax.pmean(grads, axis))
        total, _ = jax.lax.scan(
            lambda c, _: (c + jax.lax.psum(1.0, axis), None), 0.0, None, length=2
        )
        every = jax.jit(lambda v: jax.lax.all_gather(v, axis).sum())(loss)
        most = jax.lax.cond(every > 0, lambda: jax.lax.pmax(loss, axis), lambda: 0.0)
        slope = jax.grad(jax.checkpoint(lambda v: jax.lax.pmean(v, axis) ** 2))(loss)
        own = jax.lax.psum(jax.lax.axis_index(axis) * x.sum(), axis)
        return total, every, most, jax.lax.pmean(slope, axis), own, jax.lax.axis_size(axis)

    outs = [strategy.run(step, (x,), options=options) for x in strategy.distribute_dataset([X, X])]
    return jax.tree.leaves((outs, nnx.state(net)))


@pytest.mark.parametrize("lowering", ["shard_map", long("pmap")])
def test_the_axis_has_the_name_that_the_strategy_was_given(lowering: Any):
    """The bits are those of the same step over "data", in every lowering."""
    options = dj.RunOptions(lowering=lowering)
    named = trained(dj.MirroredStrategy([0, 1, 2, 3], axis_name="batch"), "batch", options)
    usual = trained(dj.MirroredStrategy([0, 1, 2, 3]), "data", options)
    for a, b in zip(named, usual, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda name: dj.OneDeviceStrategy("cpu:0", axis_name=name),
        lambda name: dj.CentralStorageStrategy([0, 1], axis_name=name),
        lambda name: dj.MultiWorkerMirroredStrategy(axis_name=name),
        lambda name: dj.TPUStrategy(axis_name=name),
    ],
)
def test_every_strategy_takes_the_name(make: Any):
    """``"data"`` is the axis too, for third-party code."""
    strategy = make("batch")
    assert strategy.axis_name == "batch"
    sums = strategy.run(lambda: (jax.lax.psum(1, "batch"), jax.lax.psum(1.0, "data")))
    assert [int(s) for s in sums] == [strategy.num_replicas_in_sync] * 2
    with pytest.raises(ValueError, match=r"axis_name must be a str.*; got 0"):
        make(0)


@pytest.mark.exhaustive
def test_the_error_for_an_unbound_axis_names_the_axis_to_use(s2: dj.MirroredStrategy):
    """Flax's and Linen's batch norm, for which JAX's error says to use shard_map."""
    with s2.scope():
        net = normed("batch")
        norm = linen.BatchNorm(use_running_average=False, axis_name="i")
        variables = norm.init(jax.random.key(0), jnp.ones((2, 3)))
    words = r"uses the axis '{}', which does not exist: the axis .* is called 'data'.*\n.*axis_name='data'"
    with pytest.raises(ValueError, match=words.format("batch")):
        s2.run(lambda: net(jnp.ones((2, 3))))
    with pytest.raises(ValueError, match=words.format("i")):
        s2.run(lambda x: norm.apply(variables, x, mutable=["batch_stats"]), (jnp.ones((2, 3)),))
