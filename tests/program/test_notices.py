"""Numbers that would be N times too small, or equal on all replicas, are reported when a step is traced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
replica = dj.get_replica_context


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Returns a function that returns what was logged."""
    with caplog.at_level(logging.WARNING, logger="distribute_jax"):
        yield lambda: [record.getMessage() for record in caplog.records]


def training(strategy: dj.Strategy, metric: Any, update: Callable[..., Any]) -> Any:
    """Runs a step that hands a part of the loss, and the losses, to ``update``; returns the metric."""
    with strategy.scope():
        model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.sgd(0.1))
        metric = metric()

    def step(x: jax.Array) -> None:
        def loss(model: nnx.Linear) -> Any:
            losses = model(x)[:, 0] ** 2
            return dj.compute_average_loss(losses), losses

        (part, losses), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        update(metric, part, losses)

    (batch,) = strategy.distribute_dataset([X])
    strategy.run(step, args=(batch,))
    return metric


AVERAGES: dict[str, Callable[[], Any]] = {
    "nnx.metrics.Average": lambda: nnx.metrics.Average("loss"),
    "nnx.metrics.Welford": lambda: nnx.metrics.Welford("loss"),
    "dj.metrics.Average": lambda: dj.metrics.Average("loss"),
    "dj.metrics.Welford": lambda: dj.metrics.Welford("loss"),
    "nnx.MultiMetric": lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
}

HALF = jax.jit(lambda x: 0.5 * x)

RIGHT: dict[str, Callable[..., Any]] = {
    "the losses": lambda metric, part, losses: metric.update(loss=losses),
    "the sum, by a function of a part": lambda metric, part, losses: metric.update(
        loss=HALF(replica().all_reduce("sum", HALF(part)))
    ),
    "their sum": lambda metric, part, losses: metric.update(loss=replica().all_reduce("sum", part)),
    "their sum by a ring": lambda metric, part, losses: metric.update(
        loss=replica().all_reduce(
            "sum", part, dj.experimental.CommunicationOptions(implementation="RING")
        )
    ),
    "the part times the replicas": lambda metric, part, losses: metric.update(
        loss=part * replica().num_replicas_in_sync
    ),
    "a test of the part": lambda metric, part, losses: metric.update(loss=jnp.isnan(part)),
    "a gradient": lambda metric, part, losses: metric.update(
        loss=jax.grad(lambda w: dj.compute_average_loss(w * losses))(1.0)
    ),
    "a mean by the size of the share": lambda metric, part, losses: metric.update(
        loss=dj.compute_average_loss(losses, global_batch_size=len(losses))
    ),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_a_part_of_the_loss_in_a_metric_that_averages_is_refused(
    s4: dj.MirroredStrategy, kind: str
):
    """``metrics.update(loss=loss)``, as in Flax's examples, would report a quarter."""
    with pytest.raises(dj.ArgumentError, match=r"averages what compute_average_loss") as caught:
        training(s4, AVERAGES[kind], lambda metric, part, losses: metric.update(loss=part))
    message = str(caught.value)
    assert "test_notices.py:" in message
    assert "the metric would be 4 times too small" in message
    assert "metrics.update(loss=losses)" in message


@pytest.mark.parametrize("way", RIGHT)
def test_a_metric_accepts_what_is_not_a_part_of_the_loss(
    s4: dj.MirroredStrategy, way: str, logged: Callable[[], list[str]], trace_only: Any
):
    def both() -> nnx.MultiMetric:
        average, welford = nnx.metrics.Average("loss"), dj.metrics.Welford("loss")
        return nnx.MultiMetric(mean=average, spread=welford)

    trace_only(lambda: training(s4, both, RIGHT[way]))
    assert not logged()


@pytest.mark.exhaustive
def test_on_one_replica_a_part_is_the_complete_mean(logged: Callable[[], list[str]]):
    """The metric has the mean of all losses, and nothing is logged."""
    one, average = dj.OneDeviceStrategy(0), AVERAGES["nnx.metrics.Average"]
    part = training(one, average, lambda metric, part, _: metric.update(loss=part))
    whole = training(one, average, lambda metric, _, losses: metric.update(loss=losses))
    np.testing.assert_allclose(part.compute(), whole.compute(), rtol=1e-6)
    assert not logged()


def test_losses_of_the_library_are_parts(s4: dj.MirroredStrategy):
    """Scaled, added up and cast, in a jit and under remat."""
    with s4.scope():
        metric = nnx.metrics.Average("loss")

    def step(x: jax.Array) -> None:
        mse = jax.jit(jax.checkpoint(lambda x: dj.losses.MeanSquaredError()(jnp.zeros_like(x), x)))
        metric.update(loss=(0.5 * mse(x) + 1.0).astype(jnp.bfloat16))

    (batch,) = s4.distribute_dataset([X])
    with pytest.raises(dj.ArgumentError, match=r"metric \(Average\) averages"):
        s4.run(step, args=(batch,))


@pytest.mark.parametrize(
    ("op", "of_loss", "after", "is_wrong"),
    [
        ("mean", 1, 1, True),
        ("mean", 1, 0.5, True),  # as by a clipped norm
        ("mean", 4, 1, False),
        ("mean", 1, 4, False),
        ("sum", 1, 1, False),
    ],
)
def test_a_mean_of_gradients_of_parts_is_logged_where_the_step_is_not_compared(
    s4: dj.MirroredStrategy,
    logged: Callable[[], list[str]],
    trace_only: Any,
    op: str,
    of_loss: float,
    after: float,
    is_wrong: bool,
):
    """The step shuffles the rows of a share; the moments of Adam show the scale, its weights do not."""
    with s4.scope():
        model, rngs = nnx.Linear(8, 1, rngs=nnx.Rngs(0)), nnx.Rngs(0)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(x: jax.Array) -> None:
        x = x[jax.random.permutation(rngs(), len(x))]

        def loss(model: nnx.Linear) -> jax.Array:
            return of_loss * dj.compute_average_loss(model(x)[:, 0] ** 2)

        gradients = replica().all_reduce(op, nnx.grad(loss)(model))
        optimizer.update(model, jax.tree.map(lambda g: after * g, gradients))

    (batch,) = s4.distribute_dataset([X])
    trace_only(lambda: s4.run(step, args=(batch,)))
    texts = [text for text in logged() if "4 times smaller than those of one device" in text]
    assert len(texts) == is_wrong
    assert all("optimizer.opt_state" in text and "test_notices.py:" in text for text in texts)


def test_a_part_in_a_callback_or_in_other_state_is_logged_once(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]], trace_only: Any
):
    """It is not an error, since the use of the sum is not known."""

    class Epoch(nnx.Metric):
        def __init__(self) -> None:
            self.loss = nnx.metrics.MetricState(jnp.zeros(()))
            self.steps = nnx.metrics.MetricState(jnp.zeros((), int))

        def add(self, part: jax.Array) -> None:
            self.loss[...] += part
            self.steps[...] += 1

    def print_part(_: None, part: jax.Array, losses: jax.Array) -> None:
        jax.debug.callback(lambda part: None, part)

    def add(metric: Any, part: jax.Array, losses: jax.Array) -> None:
        metric.add(part)

    for _ in range(2):
        trace_only(lambda: training(s4, Epoch, add))
        trace_only(lambda: training(s4, lambda: None, print_part))
    state, callback = logged()
    assert "metric adds up what compute_average_loss returned at test_notices.py" in state
    assert "it is 4 times too small" in state
    assert "The callback at test_notices.py" in callback
    trace_only(lambda: training(s4, Total, add))
    assert len(logged()) == 2


class Total(nnx.Metric):
    """The sum of the losses of the batches: what the replicas add is summed, so parts are right."""

    def __init__(self) -> None:
        self.loss = nnx.metrics.MetricState(jnp.zeros(()))

    def add(self, part: jax.Array) -> None:
        self.loss[...] += part


def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    return nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})


def test_a_dropout_mask_from_a_mirrored_key_is_logged_once(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]]
):
    """As in Linen programs: in args or captured, new-style or raw, folded with the step."""
    (batch,) = s4.distribute_dataset([X])
    captured = jax.random.PRNGKey(0)

    def step(x: jax.Array, key: jax.Array) -> Any:
        return dropped(x, key), dropped(x, jax.random.fold_in(captured, 3))[:, :2]

    for _ in range(2):
        first, _ = s4.run(step, args=(batch, jax.random.key(0)))
        s4.run(step, args=(batch, jax.random.key(0)), options=dj.RunOptions(donate_state=False))
    masks = [np.asarray(v) == 0 for v in first.values]
    assert all((masks[0] == mask).all() for mask in masks)
    named = [text for text in logged() if "for each row of the batch" in text]
    assert 1 <= len(named) <= 2
    assert "test_notices.py:" in named[0]
    assert "fold_in(key, dj.get_replica_context().replica_id_in_sync_group)" in named[0]


def test_noise_for_weights_with_as_many_rows_as_a_share_is_not_logged(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]], trace_only: Any
):
    """``optax.noisy_sgd`` keeps a key, and its noise must be equal; latent variables must not be."""
    share = len(X) // 4
    with s4.scope():
        net = nnx.Linear(X.shape[1], share, rngs=nnx.Rngs(0))
        square = nnx.Linear(share, share, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(
            square, optax.noisy_sgd(0.1, key=jax.random.key(0)), wrt=nnx.Param
        )
    (batch,) = s4.distribute_dataset([X])
    key = jax.random.key(0)

    def step(x: jax.Array) -> None:
        noisy = square.kernel[...] * jax.random.normal(key, (share, share))
        gradients = nnx.grad(
            lambda square: dj.compute_average_loss(((square(net(x)) @ noisy) ** 2).mean(1))
        )(square)
        optimizer.update(square, replica().all_reduce("sum", gradients))

    trace_only(lambda: s4.run(step, args=(batch,)))
    assert not logged()
    latent = lambda x: x.sum() + square(jax.random.normal(key, (len(x), share)))  # noqa: E731
    trace_only(lambda: s4.run(latent, args=(batch,)))
    [text] = logged()
    assert "for each row of the batch" in text


@pytest.mark.exhaustive
def test_draws_that_differ_or_are_not_for_rows_are_not_logged(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]]
):
    """The replica id folded in, ``same_on_all_replicas``, noise on weights, a step without a batch."""
    (batch,) = s4.distribute_dataset([X])
    with s4.scope():
        same = dj.same_on_all_replicas(nnx.Rngs(noise=0))

    def step(x: jax.Array, key: jax.Array) -> Any:
        own = jax.random.fold_in(key, replica().replica_id_in_sync_group)
        noise = jax.random.normal(key, (8, 3))
        return dropped(x, own) @ noise, same.noise.normal(x.shape)

    s4.run(step, args=(batch, jax.random.key(0)))
    s4.run(lambda key: jax.random.normal(key, (4, 8)), args=(jax.random.key(0),))
    assert not logged()


def gradient(w: Any, x: Any) -> Any:
    return replica().all_reduce("mean", jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))


def test_a_forgotten_distribute_dataset_is_logged(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]]
):
    """The numbers are right, with four times the work. The weights, which are returned, are not a batch."""
    w = jnp.ones((8, 1))
    for _ in range(2):
        s4.run(lambda w, x: w - gradient(w, x), args=(w, X))
    [text] = logged()
    assert "all 4 replicas compute the same from args[1] (float32[16,8]), and" in text
    assert "test_notices.py:" in text
    assert "Pass a batch of strategy.distribute_dataset" in text


@pytest.mark.parametrize(("rows", "on_host"), [(1 << 15, True), (1 << 15, False), (1 << 10, True)])
def test_a_large_host_array_beside_no_distributed_one_is_logged(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]], rows: int, on_host: bool
):
    """As of a prediction, which combines nothing; an array on the devices, or a small one, is not."""
    with s4.scope():
        x = np.ones((rows, 8), np.float32) if on_host else jnp.ones((rows, 8))
    for _ in range(2):
        s4.run(lambda x: x @ jnp.ones((8, 2)), args=(x,))
    texts = ["each call copies args[0] (float32[32768,8]) to all 4 replicas" in t for t in logged()]
    assert texts == [True] * (on_host and rows > 1 << 10)


@pytest.mark.exhaustive
def test_a_forgotten_distribute_dataset_is_logged_with_dropout_and_with_metrics(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]]
):
    """The replicas draw different masks, and count each example four times."""
    with s4.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
        metric = nnx.metrics.Average("loss")

    def masked(x: jax.Array) -> jax.Array:
        return gradient(jnp.ones((8, 1)), dropout(x))

    s4.run(masked, args=(X,))
    s4.run(lambda x: metric.update(loss=jnp.mean(x, 1)), args=(X,))
    first, second = [text for text in logged() if "is distributed" in text]
    assert "what they combine at test_notices.py" in first
    assert "what they combine, or add to a metric, is equal" in second


@pytest.mark.exhaustive
def test_steps_that_need_no_distributed_batch_are_not_logged(
    s4: dj.MirroredStrategy, logged: Callable[[], list[str]]
):
    """A distributed batch; data made on each replica; no collective; small arguments and keys."""
    w = jnp.ones((8, 1))
    (batch,) = s4.distribute_dataset([X])

    def made(w: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), replica().replica_id_in_sync_group)
        return gradient(w, jax.random.normal(key, (4, 8)))

    s4.run(gradient, args=(w, batch))
    s4.run(made, args=(w,))
    s4.run(lambda w, x: x @ w, args=(w, X))
    s4.run(lambda x, key: replica().all_reduce("sum", x), args=(jnp.ones(3), jax.random.key(0)))
    assert not logged()
