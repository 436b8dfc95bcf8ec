"""What comes together in one fit: kinds of weights, of outputs, of metrics and of variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore:The global batch has")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, 4)).astype(np.float32)
Y = RANDOM.normal(size=(11, 1)).astype(np.float32)


def made(
    strategy: dj.Strategy, module: Any, model: type[dj.Model] = dj.Model, **options: Any
) -> dj.Model:
    with strategy.scope():
        found = model(module())
    found.compile(**{"optimizer": optax.sgd(0.1), "loss": "mse", **options})
    return found


class Tokens(nnx.Module):
    """Logits of five classes for each token."""

    def __init__(self) -> None:
        self.table = nnx.Embed(5, 5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table(x)


@pytest.mark.parametrize("length", [2, 3])
def test_class_weights_and_metrics_of_flax_count_each_token(strategy: dj.Strategy, length: int):
    """With sample weights beside, also where a replica's share is as long as a sequence."""
    x, y = RANDOM.integers(0, 5, size=(2, 12, length))
    of_examples = RANDOM.uniform(size=12).astype(np.float32)
    model = made(
        strategy, Tokens, optimizer=optax.sgd(0.0), metrics=[nnx.metrics.Accuracy()],
        loss=dj.losses.SparseCategoricalCrossentropy(from_logits=True),
    )  # fmt: skip
    logits = np.asarray(model.module.table.embedding[...])[x]
    losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, y))
    weights = np.where(y == 1, 3.0, np.where(y == 2, 0.0, 1.0))
    accuracy = np.mean(logits.argmax(-1) == y)
    # Eight rows: a share of four replicas has two.
    given: dict[str, Any] = {"class_weight": {1: 3.0, 2: 0.0}, "batch_size": 8, "verbose": 0}
    for sample_weight, factor in ((None, 1.0), (of_examples, of_examples[:, None])):
        history = model.fit(x, y, sample_weight=sample_weight, **given).history
        expected = {"loss": [np.mean(losses * weights * factor)], "accuracy": [accuracy]}
        assert {k: pytest.approx(v, rel=1e-5) for k, v in expected.items()} == history


class TwoHeads(nnx.Module):
    """A dict of two outputs."""

    def __init__(self) -> None:
        self.a, self.b = (nnx.Linear(4, 1, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"a": self.a(x), "b": self.b(x)}


def test_sample_weights_may_be_given_for_one_output_alone(s4: dj.Strategy):
    """The metrics of the other output count every example."""
    model = made(
        s4, TwoHeads, loss={"a": "mse", "b": "mse"}, metrics={"b": ["mae"]},
        weighted_metrics={"a": ["mae"], "b": ["mse"]},
    )  # fmt: skip
    weight = RANDOM.uniform(size=11).astype(np.float32)
    a, b = (model.predict(X, verbose=0)[key] - Y for key in "ab")
    logs = model.evaluate(
        X, {"a": Y, "b": Y}, batch_size=4, sample_weight={"a": weight}, return_dict=True, verbose=0
    )
    assert logs == pytest.approx(
        {
            "loss": np.mean(a[:, 0] ** 2 * weight) + np.mean(b**2),
            "a_loss": np.mean(a[:, 0] ** 2 * weight), "b_loss": np.mean(b**2),
            "b_mae": np.mean(np.abs(b)), "b_mse": np.mean(b**2),
            "a_mae": np.average(np.abs(a[:, 0]), weights=weight),
        },
        rel=1e-5,
    )  # fmt: skip


class OfVariables(nnx.Module):
    """A linear layer whose weight is a ``dj.Variable``, and a count of the examples."""

    def __init__(self) -> None:
        self.w = dj.Variable(jnp.ones((4, 1)))
        self.seen = dj.Variable(
            0.0, synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )  # fmt: skip

    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        if training:
            replica = dj.get_replica_context()
            self.seen[...] += replica.batch_mask.sum() if replica.is_padded else x.shape[0]
        return x @ self.w[...]


class OfParams(nnx.Module):
    """The same of an ``nnx.Param``."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((4, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_variable_that_says_so_is_trained(strategy: dj.Strategy, policy: str):
    """As an ``nnx.Param`` is, accumulated too; both kinds are among the weights and can be set."""
    options: dict[str, Any] = {"optimizer": "adam", "gradient_accumulation_steps": 2}
    model, other = (
        made(strategy, module, dtype_policy=policy, **options) for module in (OfVariables, OfParams)
    )
    for one in (model, other):
        one.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    w, seen = model.get_weights()
    np.testing.assert_allclose(w, other.get_weights()[0], rtol=1e-5)
    assert abs(w - 1).max() > 1e-3
    assert seen == 22
    model.set_weights([w * 2, seen + 1])
    assert [float(v[...].sum()) for v in (model.module.w, model.module.seen)] == pytest.approx(
        [2 * w.sum(), 23]
    )


class Own(dj.Model):
    """A step that returns its loss."""

    def train_step(self, batch: Any) -> dict[str, jax.Array]:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)

        def loss_fn(module: Any) -> jax.Array:
            return dj.compute_average_loss(((module(x) - y) ** 2)[:, 0])

        loss, grads = nnx.value_and_grad(loss_fn)(self.module)
        self.optimizer.update(self.module, grads)
        return {"own": loss}


class Stops(dj.callbacks.Callback):
    """An interruption in the second epoch, after four of its six batches."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch == 3 and self.epoch == 1:
            raise KeyboardInterrupt

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch = epoch


def test_what_a_step_of_the_user_returned_before_an_interruption_counts(
    s4: dj.Strategy, s2: dj.Strategy, tmp_path: Path
):
    """The mean of the epoch that was interrupted is that of all its steps."""
    options: dict[str, Any] = {"batch_size": 2, "epochs": 2, "verbose": 0}
    expected = made(s4, OfParams, Own).fit(X, Y, **options).history["own"][1]
    backup = dj.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
    with pytest.raises(KeyboardInterrupt):
        made(s4, OfParams, Own).fit(X, Y, callbacks=[backup, Stops()], **options)
    history = made(s2, OfParams, Own).fit(X, Y, callbacks=[backup], **options).history
    assert history["own"] == pytest.approx([expected], rel=1e-5)
