"""Flax's BatchNorm under run: each replica's own statistics averaged, or those of the global batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj

X = np.arange(1.0, 9.0, dtype=np.float32)[:, None]
"""The numbers 1 to 8: mean 4.5, variance 5.25."""


def after_one_step(strategy: dj.Strategy, axis_name: str | None) -> nnx.BatchNorm:
    """A norm with momentum 0.5 that starts from mean 0 and variance 1 and saw the batch once."""
    with strategy.scope():
        norm = nnx.BatchNorm(1, momentum=0.5, axis_name=axis_name, rngs=nnx.Rngs(0))
    (batch,) = strategy.distribute_dataset([X])
    strategy.run(lambda x: norm(x), args=(batch,))
    return norm


def test_synchronised_running_statistics_are_those_of_the_global_batch(strategy: dj.Strategy):
    """2.25 and 3.125 on any number of replicas, as with TensorFlow's SyncBatchNormalization."""
    norm = after_one_step(strategy, "data")
    assert float(norm.mean[0]) == 2.25
    assert float(norm.var[0]) == pytest.approx(3.125, rel=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("replicas", "variance"), [(4, 0.625), long(1, 3.125), long(2, 1.125), long(8, 0.5)]
)
def test_local_running_statistics_are_averaged(replicas: int, variance: float):
    """The mean is right; the variance is the mean of the variances of the shares, as in TensorFlow."""
    norm = after_one_step(dj.MirroredStrategy(list(range(replicas))), None)
    assert float(norm.mean[0]) == 2.25
    assert float(norm.var[0]) == pytest.approx(variance, rel=1e-6)


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_running_statistics_are_synchronised_before_evaluation(
    s4: dj.MirroredStrategy, axis_name: str | None
):
    """Every replica, and code outside run, evaluates with the same mean and variance."""
    norm = after_one_step(s4, axis_name)
    dj.check_in_sync(norm)
    norm.eval()
    inside = s4.run(lambda: norm(jnp.full((1, 1), 3.0)))
    assert isinstance(inside, dj.Mirrored)
    wanted = (3.0 - float(norm.mean[0])) / np.sqrt(float(norm.var[0]) + norm.epsilon)
    np.testing.assert_allclose(inside, [[wanted]], rtol=1e-5)
    np.testing.assert_allclose(norm(jnp.full((1, 1), 3.0)), [[wanted]], rtol=1e-5)


def test_synchronised_batch_norm_normalises_as_one_device_does(strategy: dj.Strategy):
    """The outputs, and the gradients through mean and variance, are those of the whole batch."""
    with strategy.scope():
        norm = nnx.BatchNorm(1, axis_name="data", rngs=nnx.Rngs(0))
    weights = np.arange(8, dtype=np.float32)[:, None] ** 2

    def step(x, w):
        grads = nnx.grad(lambda norm: dj.compute_average_loss((norm(x) * w)[:, 0] ** 3))(norm)
        return norm(x), dj.get_replica_context().all_reduce("sum", grads)

    (batch,) = strategy.distribute_dataset([(X, weights)])
    outs, grads = strategy.run(step, args=batch)

    @nnx.jit
    def on_one_device(norm):
        return norm(X), nnx.grad(lambda norm: jnp.mean((norm(X) * weights) ** 3))(norm)

    wanted_outs, wanted = on_one_device(nnx.BatchNorm(1, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(strategy.gather(outs, axis=0), wanted_outs, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), grads, wanted)


def test_a_statistic_captured_directly_is_named(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    """The notice names the variable, once, and does not mention batch norm."""
    with s4.scope():
        seen = nnx.BatchStat(jnp.zeros(()))

    def step() -> None:
        seen[...] = dj.get_replica_context().replica_id_in_sync_group * 1.0

    s4.run(step)
    s4.run(step, options=dj.RunOptions(donate_state=False))
    [record] = caplog.records
    assert record.getMessage().startswith("seen (BatchStat) ends a step as the mean")
    assert "axis_name" not in record.getMessage()
    assert float(seen[...]) == 1.5
