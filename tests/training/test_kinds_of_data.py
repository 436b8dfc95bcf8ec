"""Labels, weights, precisions and lives of models of every kind: as on one device, or refused in words."""

from __future__ import annotations

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

import distribute_jax as dj

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(22, 3)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
W = RANDOM.uniform(0.5, 2.0, size=22).astype(np.float32)
LOGITS = dj.losses.SparseCategoricalCrossentropy(from_logits=True)


class Net(nnx.Module):
    """Logits of two classes."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> Any:
        return self.layer(x)


def made(
    strategy: dj.Strategy, module: type = Net, model: type[dj.Model] = dj.Model, **options: Any
) -> dj.Model:
    with strategy.scope():
        found = model(module())
    found.compile(**{"optimizer": optax.sgd(0.1), "loss": LOGITS, **options})
    return found


@pytest.mark.exhaustive
def test_class_numbers_of_every_kind_are_the_same_labels(s4: dj.Strategy):
    """Floats, bools, larger integers, and with a last dim of 1; one-hot ones are refused."""
    model, x, labels = made(s4), X[:8], Y[:8]
    expected = model.evaluate(x, labels, verbose=0)
    kinds = (np.float32, np.float64, bool, np.int64)
    for y in (*map(labels.astype, kinds), labels[:, None]):
        assert model.evaluate(x, y, verbose=0) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"class numbers.*One-hot labels go with dj\.losses\.Cat"):
        made(s4).evaluate(x, np.eye(2)[labels], verbose=0)


@pytest.mark.parametrize("labels", [Y.astype(np.float32), Y[:, None], np.eye(2)[Y]])
def test_labels_that_a_loss_of_optax_cannot_take_are_refused_in_words(s4: dj.Strategy, labels: Any):
    """Of its own errors, the dtype is said of one, and of the other two nothing that helps."""
    model = made(s4, loss=optax.softmax_cross_entropy_with_integer_labels)
    with pytest.raises(ValueError, match=r"of optax cannot take labels .*SparseCategorical"):
        model.evaluate(X, labels, batch_size=8, verbose=0)


class Probability(Net):
    """The probability of the second class."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.softmax(super().__call__(x))[:, 1]


def test_weighted_counts_and_areas_are_those_of_all_the_data(strategy: dj.Strategy):
    """By names and by objects, with Keras's names: each answer counts with the weight of its example."""
    metrics = ["precision", "recall", dj.metrics.AUC()]
    model = made(strategy, Probability, loss="binary_crossentropy", weighted_metrics=metrics)
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
    """Adds a penalty and the size of its hidden layer, which is for each example."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.first(x)
        self.sow(dj.AddedLoss, "decay", 0.01 * jnp.sum(self.first.kernel[...] ** 2))
        self.sow(dj.AddedLoss, "size", 0.1 * jnp.abs(hidden).sum(axis=-1))
        return self.last(nnx.relu(hidden))


class CountsRows(Net):
    """Adds a mean over all rows, padding too."""

    def __call__(self, x: jax.Array) -> jax.Array:
        z = self.layer(x)
        self.sow(dj.AddedLoss, "size", jnp.sum(jnp.where(jnp.isfinite(z), z, 0)[:3] ** 2) / len(x))
        return z


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_added_losses_in_half_precision(strategy: dj.Strategy, policy: str):
    """They are those of float32 to its rounding, which is not taken for padding that was seen."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}
    losses = [
        made(strategy, Penalised, dtype_policy=p).fit(X, Y, **options).history["loss"][0]
        for p in (policy, "float32")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.exhaustive
def test_padding_that_is_counted_is_found_in_half_precision_too(s4: dj.Strategy):
    """A mean over the rows of a replica, which has more rows than examples."""
    with pytest.raises(dj.PaddingLeakError):
        made(s4, CountsRows, dtype_policy="mixed_float16").fit(X, Y, batch_size=8, verbose=0)


class Own(dj.Model):
    """A step of one's own."""

    def train_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)

        def loss_fn(module: Any) -> jax.Array:
            return dj.compute_average_loss(
                optax.softmax_cross_entropy_with_integer_labels(module(x), y)
            )

        self.optimizer.update(self.module, nnx.grad(loss_fn)(self.module))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [dj.Model, Own])
def test_a_model_that_is_gone_leaves_nothing_behind(s4: dj.Strategy, kind: type[dj.Model]):
    """Neither its arrays nor its programs, though its strategy stays; nor do more fits of one model."""
    gc.collect()
    before = len(jax.live_arrays())
    model = made(s4, model=kind, metrics=["accuracy"])
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
    """With three batches in a dispatch, of which an epoch has five and a half."""
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    plain, saved = (made(s4, steps_per_execution=3) for _ in range(2))

    class Saves(dj.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.save(tmp_path / "model")
            self.model.load(tmp_path / "model")

    pairs = X[:20], Y[:20]
    expected = plain.fit(*pairs, **options).history
    assert saved.fit(*pairs, callbacks=[Saves()], **options).history == expected
    assert all(map(np.array_equal, plain.get_weights(), saved.get_weights()))


class OfDict(Net):
    """The input is an entry of a dict."""

    def __call__(self, x: dict[str, jax.Array]) -> Any:
        return super().__call__(x["image"])


def test_entries_of_batches_that_are_dicts_are_named(s4: dj.Strategy):
    """The same numbers as with tuples: of a list of batches, a dataset, and of arrays in a dict."""
    keys = {"x_key": "image", "y_key": "label"}
    rows = dj.data.from_arrays({"image": X, "label": Y}).batch(8)
    wanted = made(s4).fit([(X[:8], Y[:8]), (X[8:16], Y[8:16])], verbose=0)
    first = [{"image": X[i : i + 8], "label": Y[i : i + 8]} for i in (0, 8)]
    model = made(s4)
    assert model.fit(first, verbose=0, **keys).history == wanted.history
    expected = model.evaluate(X, Y, batch_size=8, verbose=0)
    for data in (rows, {"image": X, "label": Y}):
        size = {"batch_size": 8} if isinstance(data, dict) else {}
        assert model.evaluate(data, verbose=0, **keys, **size) == pytest.approx(expected)
        assert model.predict(data, x_key="image", verbose=0, **size).shape == (22, 2)
    logs = made(s4, OfDict).fit(
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
        ([{"image": X}], {"y_key": "label"}, "without x_key"),
        ([(X, Y)], {"x_key": "image"}, "a batch is a tuple. Leave them out"),
    ],
)
def test_batches_that_are_dicts_without_the_right_names_are_refused(
    s2: dj.Strategy, data: Any, keys: dict[str, str], words: str
):
    """Without names the module gets the dict; if it fails on it, a note says what to write."""
    with pytest.raises((ValueError, TypeError), match=words):
        made(s2).fit(data, verbose=0, **keys)
