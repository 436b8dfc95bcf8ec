"""Common mistakes with a model: the message says what is wrong and what to write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from model_factory import compile_model

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
LATE = np.where(np.arange(16) == 15, 2, Y)
"""Labels of which the last one is not a class."""
SPARSE = dj.losses.SparseCategoricalCrossentropy(from_logits=True)
IGNORING = dj.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-3)
OPTAX = optax.softmax_cross_entropy_with_integer_labels


def classifier(strategy: dj.Strategy, width: int = 3, **compiled: Any) -> dj.Model:
    def make_module() -> nnx.Module:
        rngs = nnx.Rngs(0)
        layers = nnx.Linear(width, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 2, rngs=rngs)
        return nnx.Sequential(*layers)

    return compile_model(strategy, make_module, **{"loss": SPARSE} | compiled)


@functools.cache
def shared() -> dj.Model:
    """A classifier whose step is compiled once."""
    return classifier(dj.MirroredStrategy([0, 1]))


def linen_model(strategy: dj.Strategy) -> dj.Model:
    with strategy.scope():
        model = dj.Model(linen.Dense(2), sample_input=X[:1])
    model.compile("sgd", SPARSE)
    return model


def save(strategy: dj.Strategy, folder: Path, weights: bool) -> str:
    model = classifier(strategy)
    path = str(folder / "model")
    (model.save_weights if weights else model.save)(path)
    return path


def two_outputs(strategy: dj.Strategy) -> dj.Model:
    with strategy.scope():
        outputs = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lambda x: {"a": x, "b": x})
        model = dj.Model(outputs)
    model.compile("sgd", {"a": SPARSE, "b": OPTAX})
    return model


def reused() -> Iterator[dict[str, np.ndarray]]:
    """Yields batches in the same buffers, as some loaders do."""
    batch = {"x": X[:8].copy(), "y": Y[:8].copy()}
    for labels in (Y[:8], LATE[8:], Y[:8], Y[:8]):
        batch["y"][:] = labels
        yield batch


Mistake = Callable[[dj.Strategy, Path], Any]
WRONG: dict[str, tuple[Mistake, str]] = {
    "labels from 1": (
        lambda s, _: classifier(s).fit(X, Y + 1, verbose=0),
        "got labels from 1 to 2, and the model has 2 outputs for the classes 0 to 1",
    ),
    "labels below 0": (lambda s, _: classifier(s).evaluate(X, Y - 1, verbose=0), "from -1 to 0"),
    "labels for optax": (
        lambda s, _: classifier(s, loss=OPTAX).fit(X, Y + 1, verbose=0), "from 1 to 2"
    ),
    "labels to validate on": (
        lambda s, _: shared().fit(X, Y, 8, validation_data=(X, Y + 1), verbose=0), "from 1 to 2"
    ),
    "a label of a later batch": (
        lambda s, _: shared().fit(X, LATE, 8, shuffle=False, verbose=0),
        "got labels from 0 to 2 in batch 1 of the dataset, and the model has 2 outputs",
    ),
    "a label of a batch that is dispatched with the first": (
        lambda s, _: classifier(s, steps_per_execution=2).fit(X, LATE, 8, shuffle=False, verbose=0),
        "got labels from 0 to 2, and the model has 2 outputs",
    ),
    "a label in a dict of a loader that reuses its buffers": (
        lambda s, _: shared().fit(reused(), x_key="x", y_key="y", verbose=0),
        "from 0 to 2 in batch 1",
    ),
    "a label for one of two outputs": (
        lambda s, _: two_outputs(s).fit(X, {"a": Y, "b": LATE}, 8, shuffle=False, verbose=0),
        "from 0 to 2 in batch 1 of the dataset for the output 'b'",
    ),
    "a label beside those that are ignored": (
        lambda s, _: classifier(s, loss=IGNORING).fit(X, LATE - 3 * (LATE == 0), 8, shuffle=False, verbose=0),
        "from 1 to 2 in batch 1",
    ),
    "width in fit": (
        lambda s, _: classifier(s, 5).fit(X, Y, verbose=0),
        r"in Sequential -> Linear, called with float32\[8,3\]. It takes inputs whose last dim is 5",
    ),
    "width in predict": (lambda s, _: classifier(s, 5).predict(X), r"float32\[8,3\]. It takes inputs"),
    "width in a call": (lambda s, _: classifier(s, 5)(X), r"float32\[16,3\]. It takes inputs"),
    "width of Linen": (
        lambda s, _: linen_model(s).fit(X[:, :2], Y, verbose=0), r"Dense, called with float32\[8,2\]"
    ),
    "one tuple": (lambda s, _: classifier(s).fit((X, Y), verbose=0), r"call fit\(x, y\)\. If they are"),
    "predict with targets": (
        lambda s, _: classifier(s).predict(X, Y),
        r"predict: batch_size must be None or an integer; got int32\[16\]",
    ),
    "validation without targets": (
        lambda s, _: classifier(s).fit(X, Y, validation_data=X, verbose=0),
        r"fit\(validation_data\) must be \(x, y\).*got float32\[16,3\]",
    ),
    "an array for verbose": (lambda s, _: classifier(s).fit(X, Y, 32, 1, (X, Y)), "got a tuple.$"),
    "metric": (lambda s, _: classifier(s, metrics=["accurate"]), r"Did you mean 'accuracy'\?"),
    "metric of an output": (
        lambda s, _: classifier(s, loss=[SPARSE], metrics={0: ["f1"]}), "The names are .*acc, accuracy"
    ),
    "loss": (lambda s, _: classifier(s, loss="mean_square_error"), "mean 'mean_squared_error' or"),
    "optimizer": (lambda s, _: classifier(s, optimizer="adamm"), "mean 'adam' or 'nadam'"),
    "swapped": (
        lambda s, path: dj.CheckpointManager(path).save({"m": classifier(s).module}, 3),  # type: ignore[arg-type]
        "step must be an integer >= 0; got a dict",
    ),
    "weights of a model": (
        lambda s, path: classifier(s).load_weights(save(s, path, weights=False)),
        "Model.load reads what Model.save wrote",
    ),
    "a model of weights": (
        lambda s, path: classifier(s).load(save(s, path, weights=True)),
        "load_weights what save_weights wrote",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_the_message_says_what_to_write(mistake: str, s2: dj.MirroredStrategy, tmp_path: Path):
    """In the text or in a note; no message contains a model or an array."""
    make, words = WRONG[mistake]
    with pytest.raises((ValueError, TypeError, linen.module.errors.FlaxError)) as caught:
        make(s2, tmp_path)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    caught.match(words)
    assert len(str(caught.value)) < 900
    assert not any(part in text for part in ("Param(", "# Param", "array([")), text


def test_setting_trainable_is_refused(s2: dj.MirroredStrategy):
    with pytest.raises(AttributeError, match=r"compile\(trainable='\^head'\)"):
        classifier(s2).trainable = False


@pytest.mark.exhaustive
def test_labels_are_checked_in_every_fit_before_a_step(s2: dj.MirroredStrategy):
    """Also if the step is compiled already; those of ``ignore_class`` are not."""
    model = classifier(s2)
    model.fit(X, Y, verbose=0)
    before = model.get_weights()
    with pytest.raises(dj.ArgumentError, match="labels from 1 to 2"):
        model.fit(X, Y + 1, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, before, model.get_weights())
    ignoring = dj.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    history = classifier(s2, loss=ignoring).fit(X, np.where(Y > 0, 1, -1), verbose=0)
    assert np.isfinite(history.history["loss"][0])


def test_a_checkpoint_of_another_optimizer_says_so(s2: dj.MirroredStrategy, tmp_path: Path):
    path = save(s2, tmp_path, weights=False)
    model = classifier(s2, optimizer="adam")
    with pytest.raises(dj.CheckpointError, match=r"another optimizer: .* first at \['optimizer'\]"):
        model.load(path)
    model.compile("sgd", SPARSE)
    model.load(path)
    loaded = model.get_weights()
    model.compile("adam", SPARSE)
    jax.tree.map(np.testing.assert_array_equal, loaded, model.get_weights())
