"""Arguments of ``fit`` that have several meanings."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_factory import compile_model, linear

import distribute_jax as dj

X = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1)
Y = 2 * X


class OwnStep(dj.Model):
    """Does not update the metrics of ``compile``."""

    def train_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)
        loss, grads = nnx.value_and_grad(
            lambda module: dj.compute_average_loss(jnp.abs(module(x) - y)[:, 0])
        )(self.module)
        self.optimizer.update(self.module, grads)
        return {"loss": loss}


def make_model(strategy: dj.Strategy, kind: type = dj.Model, **options: Any) -> dj.Model:
    return compile_model(strategy, linear(1), kind, **options)


@functools.cache
def shared() -> dj.Model:
    """A model whose steps are compiled once for several tests."""
    return make_model(dj.MirroredStrategy([0, 1, 2, 3]))


def test_a_list_of_numbers_is_one_array():
    model = shared()
    wanted = model.evaluate(X, Y, verbose=0)
    assert model.evaluate(X.tolist(), Y.tolist(), verbose=0) == pytest.approx(wanted)
    assert model.evaluate(X, list(Y[:, 0]), verbose=0) == pytest.approx(wanted)  # of NumPy


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error")
def test_metrics_that_an_overridden_step_does_not_update_are_not_reported(s4: dj.MirroredStrategy):
    model = make_model(s4, OwnStep, metrics=["mae"])
    history = model.fit(X, Y, validation_data=(X, Y), verbose=0).history
    assert sorted(history) == ["loss", "val_loss", "val_mae"]
    wanted = float(np.abs(model.predict(X, verbose=0) - Y).mean())
    assert model.train_on_batch(X, Y) == pytest.approx(wanted)


class WithoutTargets(OwnStep):
    def train_step(self, batch: Any) -> Any:
        return super().train_step((*batch, 2 * batch[0]))

    def test_step(self, batch: Any) -> Any:
        (x,) = batch
        return {"mean": dj.compute_average_loss(x[:, 0])}


@pytest.mark.exhaustive
def test_inputs_without_targets_can_be_split(s2: dj.MirroredStrategy):
    """And are then batched."""
    model, seen = make_model(s2, WithoutTargets), []
    count = dj.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(batch))
    for data, mean in ({"validation_split": 0.5}, 6.5), ({"validation_data": (X,)}, 4.5):
        history = model.fit(X, batch_size=2, callbacks=[count], verbose=0, **data).history
        assert history["val_mean"] == [pytest.approx(mean)]
    assert seen == [0, 1, 0, 1, 2, 3]


class TwoInputs(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def __call__(self, inputs: Any) -> Any:
        a, b = inputs
        return self.layer(a) + 0.1 * b


@pytest.mark.exhaustive
def test_a_list_or_tuple_of_equally_long_arrays_is_several_inputs(s4: dj.MirroredStrategy):
    model = compile_model(s4, TwoInputs, optimizer=optax.sgd(0.0))
    kernel, bias = (
        np.asarray(w[...]) for w in (model.module.layer.kernel, model.module.layer.bias)
    )
    rows = X @ kernel + bias + 0.1 * Y
    loss = pytest.approx(np.mean((rows - Y) ** 2), rel=1e-5)
    for x in ([X, Y], (X, Y)):
        np.testing.assert_allclose(model.predict(x, verbose=0), rows, rtol=1e-5)
        assert model.evaluate(x, Y, verbose=0) == loss
        history = model.fit(x, Y, validation_data=(x, Y), verbose=0).history
        assert history == {"loss": [loss], "val_loss": [loss]}
    batches = [((X[:5], Y[:5]),), ((X[5:], Y[5:]),)]
    np.testing.assert_allclose(model.predict(batches, verbose=0), rows, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_list_of_batches_is_one_of_tuples_or_of_different_lengths(s4: dj.MirroredStrategy):
    model = make_model(s4)
    wanted = model.predict(X, verbose=0)
    for x in ([X[:5], X[5:]], [(X[:4],), (X[4:],)], [X], (X,), X.tolist()):
        np.testing.assert_allclose(model.predict(x, verbose=0), wanted, rtol=1e-6)
    assert model.evaluate([X], Y, verbose=0) == model.evaluate(X, Y, verbose=0)
    with pytest.raises(ValueError, match="one row for each example") as caught:
        model.predict([X[:4], X[4:]], verbose=0)
    assert "predict([(batch,) for batch in x])" in caught.value.__notes__[-1]


def test_a_module_that_fails_on_several_inputs_says_how_they_were_interpreted(
    s4: dj.MirroredStrategy,
):
    with s4.scope():
        model = dj.Model(TwoInputs())
    with pytest.raises(
        ValueError, match=r"too many values(.|\n)*3 inputs of each .*\(batch,\) for"
    ):
        model.predict([X, X, X], verbose=0)


@pytest.mark.parametrize("data", [[], [(X[:0], Y[:0])]], ids=["no batches", "empty batches"])
def test_data_without_an_example_is_refused(data: list[Any]):
    """By the name of the argument; before, fit warned, and its history was empty or NaN."""
    model = shared()
    for run in (model.fit, model.evaluate, model.predict):
        with pytest.raises(ValueError, match=f"^{run.__name__} got data without any example"):
            run(data, verbose=0)
    with pytest.raises(ValueError, match=r"^fit\(validation_data\) got data without"):
        model.fit(X, Y, validation_data=data, verbose=0)
    assert model.predict([], steps=0, verbose=0) is None


def test_an_iterator_is_continued():
    """It cannot start again: each epoch or call takes its next batches; a list starts again."""
    model = shared()
    model.learning_rate = 0.0
    batches = [(X, Y * i) for i in range(6)]
    single = [model.evaluate(*batch, verbose=0) for batch in batches]
    next_two = [np.mean(single[i : i + 2]) for i in (0, 2, 4)]
    for data, expected in (iter(batches), next_two), (batches, next_two[:1] * 3):
        losses = []
        for epochs in (2, 1):
            validation: Any = {"validation_data": data, "validation_steps": 2, "verbose": 0}
            losses += model.fit(X, Y, epochs=epochs, **validation).history["val_loss"]
        assert losses == pytest.approx(expected)
    data = (batch for batch in batches)
    losses = [model.evaluate(data, steps=1, verbose=0) for _ in range(2)]
    losses += model.fit(data, steps_per_epoch=1, epochs=2, verbose=0).history["loss"]
    model.fit(data, steps_per_epoch=1, epochs=0, verbose=0)
    losses += model.fit(data, steps_per_epoch=1, verbose=0).history["loss"]
    assert [*losses, model.evaluate(data, verbose=0)] == pytest.approx(single)
    with pytest.raises(ValueError, match="two distributed datasets"):
        model.evaluate(data, verbose=0)


@pytest.mark.exhaustive
def test_data_that_is_also_validated_on_keeps_the_order_of_its_epochs(s2: dj.MirroredStrategy):
    losses = []
    for is_validated in (True, False):
        data = s2.distribute_dataset(dj.data.from_arrays((X, Y)).shuffle(seed=0).batch(2))
        options = {"validation_data": data} if is_validated else {}
        losses.append(make_model(s2).fit(data, epochs=3, verbose=0, **options).history["loss"])
    assert losses[0] == losses[1]
