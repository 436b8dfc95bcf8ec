"""Under ``jax.numpy_dtype_promotion("strict")``, which is for user code, the library computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).uniform(0.1, 0.9, size=(13, 3)).astype(np.float32)
Y = np.arange(13, dtype=np.int32) % 3
M = dj.metrics


def metric(make: Callable[[], Any], **words: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns a program that updates a metric with a full and a partial batch."""

    def program(strategy: dj.Strategy, batches: Any) -> Any:
        with strategy.scope():
            made = make()
        for batch in batches:
            strategy.run(lambda x, y: made.update(**{k: f(x, y) for k, f in words.items()}), batch)
        return made.compute()

    return program


def loss(strategy: dj.Strategy, batches: Any) -> Any:
    """The losses of every kind, and the part of a mean with integers as weights."""

    def step(x: Any, y: Any) -> Any:
        hot = jax.nn.one_hot(y, 3, dtype=x.dtype)
        every = [getattr(dj.losses, name) for name in dj.losses.__all__]
        every = [one for one in every if isinstance(one, type) and issubclass(one, dj.losses.Loss)]
        parts = [
            one()(y if one.__name__.startswith("Sparse") else hot, x)
            for one in every
            if one is not dj.losses.Loss
        ]
        parts += [
            dj.compute_average_loss(x[:, 0]),
            dj.compute_average_loss(x[:, 0], sample_weight=y),
        ]
        parts += [dj.scale_regularization_loss(x[:0].sum())]
        return dj.get_replica_context().all_reduce("sum", parts)

    return [strategy.run(step, batch) for batch in batches]


def optimizer(tx: Any, **options: Any) -> Callable[..., Any]:
    """Returns a program that trains a layer for two steps."""

    def program(strategy: dj.Strategy, batches: Any) -> Any:
        with strategy.scope():
            model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            made = dj.Optimizer(model, tx, **options)

        def step(x: Any, y: Any) -> Any:
            def loss(model: Any) -> Any:
                losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
                return made.scale_loss(dj.compute_average_loss(losses))

            made.update(model, nnx.grad(loss)(model))

        for batch in batches:
            strategy.run(step, batch)
        return model.kernel[...]

    return program


def fit(strategy: dj.Strategy, batches: Any) -> Any:
    """Runs ``fit`` with weights of classes and examples."""
    with strategy.scope():
        model = dj.Model(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    probable = dj.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("nadam", probable, metrics=["accuracy"], weighted_metrics=["accuracy"])
    history = model.fit(
        X, Y, sample_weight=X[:, 0], class_weight={0: 2.0}, verbose=0, batch_size=8, epochs=2
    )
    return history.history["loss"]


def reduced(strategy: dj.Strategy, batches: Any) -> Any:
    """Reduces batches outside ``run``."""
    return [strategy.reduce("mean", x, axis=0) for x, _ in batches]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "average": metric(lambda: M.Average("loss"), loss=lambda x, y: x[:, 0]),
    "welford": metric(lambda: M.Welford("loss"), loss=lambda x, y: x[:, 0]),
    "accuracy": metric(lambda: M.Accuracy(), logits=lambda x, y: x, labels=lambda x, y: y),
    "auc": metric(M.AUC, predictions=lambda x, y: x[:, 0], labels=lambda x, y: y % 2),
    "recall": metric(M.Recall, predictions=lambda x, y: x[:, 0], labels=lambda x, y: y % 2),
    "losses": loss,
    "adamw, accumulated": optimizer(optax.adamw(0.1), gradient_accumulation_steps=2),
    "sgd, scaled": optimizer(optax.sgd(0.1), loss_scale="dynamic", clip_global_norm=1.0),
    "fit": fit,
    "reduce": reduced,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_library_computes_the_same_under_strict_promotion(s2: dj.MirroredStrategy, name: str):
    source = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    usual = PROGRAMS[name](s2, list(s2.distribute_dataset(source)))
    with jax.numpy_dtype_promotion("strict"):
        strict = PROGRAMS[name](s2, list(s2.distribute_dataset(source)))
        with pytest.raises(Exception, match="implicit dtype promotion"):
            s2.run(lambda: jnp.ones(1) + jnp.arange(1))
    jax.tree.map(np.testing.assert_array_equal, usual, strict)
