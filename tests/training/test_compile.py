"""What ``compile`` takes: optimizers, losses and metrics of every kind, and which weights are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_close
from model_factory import Net, compile_model, linear

import distribute_jax as dj
from distribute_jax.training._keras_optimizers import with_adjustable_rate

RNG = np.random.default_rng(1)
X = RNG.normal(size=(22, 3)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
W = RNG.uniform(0.5, 2.0, size=22).astype(np.float32)


def make_model(strategy: dj.Strategy, module: Callable[[], Any] = Net, **options: Any) -> dj.Model:
    loss = {"loss": optax.softmax_cross_entropy_with_integer_labels}
    return compile_model(strategy, module, **loss | options)


def own_metric(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns the distance between the logits."""
    return jnp.abs(y_pred[:, 0] - y_pred[:, 1])


@pytest.mark.exhaustive
def test_metrics_of_every_kind(strategy: dj.Strategy):
    model = make_model(
        strategy,
        metrics=["accuracy", own_metric, dj.metrics.Accuracy(), nnx.metrics.Accuracy()],
        weighted_metrics=["accuracy", own_metric],
    )
    logs = model.evaluate(X, Y, sample_weight=W, batch_size=8, return_dict=True)
    logits = model.predict(X, batch_size=8)
    right = (logits.argmax(-1) == Y).astype(np.float32)
    apart = np.abs(logits[:, 0] - logits[:, 1])
    losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, Y))
    assert logs == pytest.approx(
        {
            # the loss of a batch is divided by its examples, and the epoch's is the mean over these
            "loss": np.sum(losses * W) / 22,
            "accuracy": right.mean(),
            "own_metric": apart.mean(),
            "accuracy_1": right.mean(),
            "accuracy_2": right.mean(),
            "weighted_accuracy": np.average(right, weights=W),
            "weighted_own_metric": np.average(apart, weights=W),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: optax.rmsprop(rate, momentum=0.9),
        *(long(tx) for tx in (optax.adamw, optax.adafactor, optax.fromage)),
    ],
)
@pytest.mark.parametrize("rate", [0.1, 1.0, optax.cosine_decay_schedule(0.1, 5)])
def test_a_rate_that_became_state_changes_no_update(make: Any, rate: Any):
    """To rounding: XLA no longer folds a constant. Fromage, which uses the rate twice, does not change."""
    plain = make(rate)
    adjustable = with_adjustable_rate(optax.chain(optax.clip_by_global_norm(1.0), plain))
    params = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
    finals = []
    for tx in (optax.chain(optax.clip_by_global_norm(1.0), plain), adjustable):
        now, state = params, tx.init(params)

        def step(now: Any, state: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(jax.tree.map(jnp.sin, now), state, now)
            return optax.apply_updates(now, updates), state

        step = jax.jit(step)
        for _ in range(3):
            now, state = step(now, state)
        finals.append(now)
    assert_close(*finals, rtol=2e-7)
    rates = [part.hyperparams["learning_rate"] for part in state if hasattr(part, "hyperparams")]
    last = rate if isinstance(rate, float) else float(rate(2))
    assert [float(r) for r in rates] == pytest.approx([] if make is optax.fromage else [last])


@pytest.mark.exhaustive
def test_dj_optimizers_are_used_and_nnx_optimizers_refused(s4: dj.MirroredStrategy):
    with s4.scope():
        model = dj.Model(Net())
        own = dj.Optimizer(model.module, optax.adam(0.1))
        model.compile(own, optax.softmax_cross_entropy_with_integer_labels)
        plain = nnx.Optimizer(model.module, optax.adam(0.1), wrt=nnx.Param)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert model.optimizer is own
    assert int(own.step[...]) == 3
    with pytest.raises(ValueError, match="does not sum"):
        model.compile(plain, "mse")


@pytest.mark.exhaustive
def test_captured_values_of_losses_and_metrics_are_read_at_each_step(s4: dj.MirroredStrategy):
    factor = [1.0]

    def scaled(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return factor[0] * jnp.abs(y_pred[:, 0] - y_true)

    metrics = [scaled, dj.metrics.MeanMetricWrapper(scaled)]
    model = make_model(s4, loss=scaled, metrics=metrics)
    before = model.evaluate(X, Y)
    factor[0] = 3.0
    assert model.evaluate(X, Y) == pytest.approx([3 * value for value in before])


class Headed(nnx.Module):
    """A body with a batch norm, and a head, large enough to be sharded."""

    def __init__(self) -> None:
        self.body = nnx.Linear(3, 1024, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(1024, axis_name="data", rngs=nnx.Rngs(1))
        self.head = nnx.Linear(1024, 1, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.body(x)))


TARGETS = X[:16].sum(axis=1, keepdims=True)


def headed(strategy: dj.Strategy, **options: Any) -> dj.Model:
    return compile_model(strategy, Headed, optimizer=optax.adam(0.1), **options)


@pytest.mark.exhaustive
def test_only_trained_weights_change_and_have_optimizer_state(s4: dj.Strategy):
    model, first = headed(s4, trainable="^head"), Headed()
    model.fit(X[:16], TARGETS, batch_size=8, verbose=0)
    for layer in ("body", "norm"):
        states = [nnx.state(getattr(module, layer)) for module in (model.module, first)]
        jax.tree.map(np.testing.assert_array_equal, *states)
    assert not np.array_equal(model.module.head.kernel[...], first.head.kernel[...])
    state = jax.tree.leaves(nnx.state(model.optimizer))
    assert sum(leaf.size for leaf in state if leaf.ndim) == 2 * 1025
    assert "1,025 trained parameters" in repr(model)
    lines: list[str] = []
    model.summary(lines.append)
    assert "Trainable: 1,025 parameters" in lines[0]
    assert not model.module.norm.use_running_average


@pytest.mark.exhaustive
def test_filters_that_select_no_weight_are_refused():
    model = headed(dj.OneDeviceStrategy("cpu:0"), trainable=lambda path, _: "norm" in path)
    assert "2,048 trained parameters" in repr(model)
    with pytest.raises(dj.ArgumentError, match=r"(?s)selects no weight of:.*head\.kernel"):
        model.compile(trainable="^haed")
    with pytest.raises(dj.ArgumentError, match=r"compile\(trainable\) must be a regular expr"):
        model.compile(trainable=3)


@pytest.mark.exhaustive
def test_parameter_servers_accumulate_for_lamb():
    """Its ``jnp.where`` makes JAX record the mesh, without any communication."""
    weights = []
    for strategy in (
        dj.ParameterServerStrategy(workers=2, servers=2, max_staleness=0),
        dj.OneDeviceStrategy("cpu:0"),
    ):
        options = {"optimizer": optax.lamb(0.1), "gradient_accumulation_steps": 2}
        model = compile_model(strategy, linear(3), **options)
        model.fit(X[:16], TARGETS, batch_size=4, verbose=0)
        weights.append(model.get_weights())
    assert_close(*weights, rtol=2e-5, atol=2e-6)
