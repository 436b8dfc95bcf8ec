"""Labels, weights and precisions of every kind, and the lifetime of models."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import sum_on_read
from model_factory import Net, compile_model

import distribute_jax as dj

pytestmark = pytest.mark.filterwarnings("ignore:The global batch has")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(22, 3)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
W = RANDOM.uniform(0.5, 2.0, size=22).astype(np.float32)
LOGITS = dj.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(
    strategy: dj.Strategy, module: Any = Net, model: type[dj.Model] = dj.Model, **options: Any
) -> dj.Model:
    defaults = {"optimizer": optax.sgd(0.1), "loss": LOGITS}
    return compile_model(strategy, module, model, **defaults | options)


@pytest.mark.exhaustive
def test_class_numbers_of_every_dtype_are_labels(s4: dj.Strategy):
    """One-hot labels are refused."""
    model, x, labels = make_model(s4), X[:8], Y[:8]
    expected = model.evaluate(x, labels, verbose=0)
    kinds = (np.float32, np.float64, bool, np.int64)
    for y in (*map(labels.astype, kinds), labels[:, None]):
        assert model.evaluate(x, y, verbose=0) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"class numbers.*For one-hot labels use dj\.losses\.Cat"):
        make_model(s4).evaluate(x, np.eye(2)[labels], verbose=0)


@pytest.mark.parametrize("labels", [Y.astype(np.float32), Y[:, None], np.eye(2)[Y]])
def test_an_error_of_a_loss_of_optax_shows_its_labels(s4: dj.Strategy, labels: Any):
    model = make_model(s4, loss=optax.softmax_cross_entropy_with_integer_labels)
    with pytest.raises((ValueError, TypeError)) as caught:
        model.evaluate(X, labels, batch_size=8, verbose=0)
    assert "was called with labels" in "".join(caught.value.__notes__)


class Probability(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.softmax(super().__call__(x))[:, 1]


@pytest.mark.exhaustive
def test_weighted_precision_recall_and_auc(strategy: dj.Strategy):
    metrics = ["precision", "recall", dj.metrics.AUC()]
    model = make_model(strategy, Probability, loss="binary_crossentropy", weighted_metrics=metrics)
    logs = model.evaluate(X, Y, sample_weight=W, batch_size=8, return_dict=True, verbose=0)
    p = model.predict(X, verbose=0)
    said, right = p > 0.5, Y == 1
    assert logs["precision"] == pytest.approx(W[said & right].sum() / W[said].sum(), rel=1e-5)
    assert logs["recall"] == pytest.approx(W[said & right].sum() / W[right].sum(), rel=1e-5)
    between = np.floor(p * 199)  # of two between the same thresholds, neither is above
    above = np.sign(between[right][:, None] - between[~right]) / 2 + 0.5
    area = W[right] @ above @ W[~right] / W[right].sum() / W[~right].sum()
    assert logs["auc"] == pytest.approx(area, rel=1e-4)


class Penalised(nnx.Module):
    """Adds a penalty, and per example the size of its hidden layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.first(x)
        self.sow(dj.AddedLoss, "decay", 0.01 * jnp.sum(self.first.kernel[...] ** 2))
        self.sow(dj.AddedLoss, "size", 0.1 * jnp.abs(hidden).sum(axis=-1))
        return self.last(nnx.relu(hidden))


class CountsRows(Net):
    """Adds a mean over all rows, including padding."""

    def __call__(self, x: jax.Array) -> jax.Array:
        z = self.layer(x)
        self.sow(dj.AddedLoss, "size", jnp.sum(jnp.where(jnp.isfinite(z), z, 0)[:3] ** 2) / len(x))
        return z


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_added_losses_in_half_precision(strategy: dj.Strategy, policy: str):
    options: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}
    losses = [
        make_model(strategy, Penalised, dtype_policy=p).fit(X, Y, **options).history["loss"][0]
        for p in (policy, "float32")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.exhaustive
def test_padding_that_is_counted_is_found_in_half_precision_too(s4: dj.Strategy):
    with pytest.raises(dj.PaddingLeakError):
        make_model(s4, CountsRows, dtype_policy="mixed_float16").fit(X, Y, batch_size=8, verbose=0)


class Own(dj.Model):
    def train_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)

        def loss_fn(module: Any) -> jax.Array:
            return dj.compute_average_loss(
                optax.softmax_cross_entropy_with_integer_labels(module(x), y)
            )

        self.optimizer.update(self.module, nnx.grad(loss_fn)(self.module))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [dj.Model, Own])
def test_a_deleted_model_frees_its_arrays_and_programs(s4: dj.Strategy, kind: type[dj.Model]):
    """Though its strategy stays; more fits of one model add none."""
    gc.collect()
    before = len(jax.live_arrays())
    model = make_model(s4, model=kind, metrics=["accuracy"])
    counts = []
    for _ in range(4):
        model.fit(X, Y, batch_size=8, validation_data=(X, Y), verbose=0)
        model.predict(X, verbose=0)
        gc.collect()
        counts.append((len(jax.live_arrays()), s4._runner.programs()))
    assert len(set(counts[1:])) == 1
    module = weakref.ref(model.module)
    del model
    gc.collect()
    assert module() is None
    assert s4._runner.programs() == 0
    # Each of the last steps may be unfinished: one array of it is kept to wait for.
    assert len(jax.live_arrays()) <= before + s4._runner.steps_in_flight


@pytest.mark.exhaustive
def test_saving_and_loading_between_dispatches_changes_nothing(s4: dj.Strategy, tmp_path: Path):
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    plain, saved = (make_model(s4, steps_per_execution=3) for _ in range(2))

    class Saves(dj.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.save(tmp_path / "model")
            self.model.load(tmp_path / "model")

    pairs = X[:20], Y[:20]
    expected = plain.fit(*pairs, **options).history
    assert saved.fit(*pairs, callbacks=[Saves()], **options).history == expected
    assert all(map(np.array_equal, plain.get_weights(), saved.get_weights()))


class OfDict(Net):
    def __call__(self, x: dict[str, jax.Array]) -> Any:
        return super().__call__(x["image"])


@pytest.mark.exhaustive
def test_x_key_and_y_key_name_entries_of_dict_batches(s4: dj.Strategy):
    keys = {"x_key": "image", "y_key": "label"}
    rows = dj.data.from_arrays({"image": X, "label": Y}).batch(8)
    wanted = make_model(s4).fit([(X[:8], Y[:8]), (X[8:16], Y[8:16])], verbose=0)
    first = [{"image": X[i : i + 8], "label": Y[i : i + 8]} for i in (0, 8)]
    model = make_model(s4)
    assert model.fit(first, verbose=0, **keys).history == wanted.history
    expected = model.evaluate(X, Y, batch_size=8, verbose=0)
    for data in (rows, {"image": X, "label": Y}):
        size = {"batch_size": 8} if isinstance(data, dict) else {}
        assert model.evaluate(data, verbose=0, **keys, **size) == pytest.approx(expected)
        assert model.predict(data, x_key="image", verbose=0, **size).shape == (22, 2)
    logs = make_model(s4, OfDict).fit(
        first, verbose=0, x_key=["image"], y_key="label", validation_data=first
    )
    assert logs.history["loss"] == wanted.history["loss"]


@pytest.mark.parametrize(
    ("data", "keys", "words"),
    [
        (
            [{"image": X, "label": Y}],
            {},
            r"dicts of 'image', 'label'.*fit\(dataset, x_key=…, y_key=…\)",
        ),
        ([{"image": X}], {"x_key": "im", "y_key": "label"}, r"no entry 'im'.*\['image'\]"),
        ([{"image": X}], {"y_key": "label"}, "also beside y_key"),
        ([(X, Y)], {"x_key": "image"}, "a batch is a tuple. Pass x_key"),
    ],
)
def test_dict_batches_without_the_right_keys_are_refused(
    s2: dj.Strategy, data: Any, keys: dict[str, str], words: str
):
    with pytest.raises((ValueError, TypeError), match=words):
        make_model(s2).fit(data, verbose=0, **keys)


ROWS = RANDOM.normal(size=(11, 4)).astype(np.float32)
SUMS = RANDOM.normal(size=(11, 1)).astype(np.float32)
squared = functools.partial(make_model, loss="mse")


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [2, 3])
def test_class_weights_and_metrics_of_flax_count_each_token(strategy: dj.Strategy, length: int):
    """Also if a replica's share is as long as a sequence."""
    x, y = RANDOM.integers(0, 5, size=(2, 12, length))
    of_examples = RANDOM.uniform(size=12).astype(np.float32)
    tokens, metrics = lambda: nnx.Embed(5, 5, rngs=nnx.Rngs(0)), [nnx.metrics.Accuracy()]
    model = make_model(strategy, tokens, optimizer=optax.sgd(0.0), metrics=metrics)
    logits = np.asarray(model.module.embedding[...])[x]
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
    def __init__(self) -> None:
        self.a, self.b = (nnx.Linear(4, 1, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"a": self.a(x), "b": self.b(x)}


@pytest.mark.exhaustive
def test_sample_weights_for_one_of_two_outputs(s4: dj.Strategy):
    model = squared(
        s4, TwoHeads, loss={"a": "mse", "b": "mse"}, metrics={"b": ["mae"]},
        weighted_metrics={"a": ["mae"], "b": ["mse"]},
    )  # fmt: skip
    weight = RANDOM.uniform(size=11).astype(np.float32)
    a, b = (model.predict(ROWS, verbose=0)[key] - SUMS for key in "ab")
    y, weights = {"a": SUMS, "b": SUMS}, {"a": weight}
    logs = model.evaluate(ROWS, y, batch_size=4, sample_weight=weights, return_dict=True, verbose=0)
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
        self.seen = sum_on_read()

    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        if training:
            replica = dj.get_replica_context()
            self.seen[...] += replica.batch_mask.sum() if replica.is_padded else x.shape[0]
        return x @ self.w[...]


def of_params() -> nnx.Linear:
    """The same with an ``nnx.Param``."""
    ones = nnx.initializers.ones
    return nnx.Linear(4, 1, use_bias=False, kernel_init=ones, rngs=nnx.Rngs(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_trainable_variables_are_trained_like_params(strategy: dj.Strategy, policy: str):
    options: dict[str, Any] = {"optimizer": "adam", "gradient_accumulation_steps": 2}
    model, other = (
        squared(strategy, module, dtype_policy=policy, **options)
        for module in (OfVariables, of_params)
    )
    for one in (model, other):
        one.fit(ROWS, SUMS, batch_size=4, epochs=2, shuffle=False, verbose=0)
    w, seen = model.get_weights()
    np.testing.assert_allclose(w, other.get_weights()[0], rtol=1e-5)
    assert abs(w - 1).max() > 1e-3
    assert seen == 22
    model.set_weights([w * 2, seen + 1])
    assert [float(v[...].sum()) for v in (model.module.w, model.module.seen)] == pytest.approx(
        [2 * w.sum(), 23]
    )


class Returning(dj.Model):
    def train_step(self, batch: Any) -> dict[str, jax.Array]:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)
        loss, grads = nnx.value_and_grad(
            lambda module: dj.compute_average_loss(((module(x) - y) ** 2)[:, 0])
        )(self.module)
        self.optimizer.update(self.module, grads)
        return {"own": loss}


class Stops(dj.callbacks.Callback):
    """Interrupts the second epoch after four of its six batches."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch == 3 and self.epoch == 1:
            raise KeyboardInterrupt

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch = epoch


@pytest.mark.exhaustive
def test_logs_of_an_overridden_step_before_an_interruption_count(
    s4: dj.Strategy, s2: dj.Strategy, tmp_path: Path
):
    options: dict[str, Any] = {"batch_size": 2, "epochs": 2, "verbose": 0}
    expected = squared(s4, of_params, Returning).fit(ROWS, SUMS, **options).history["own"][1]
    backup = dj.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
    with pytest.raises(KeyboardInterrupt):
        squared(s4, of_params, Returning).fit(ROWS, SUMS, callbacks=[backup, Stops()], **options)
    history = (
        squared(s2, of_params, Returning).fit(ROWS, SUMS, callbacks=[backup], **options).history
    )
    assert history["own"] == pytest.approx([expected], rel=1e-5)
