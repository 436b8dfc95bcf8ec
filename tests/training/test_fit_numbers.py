"""The worked numbers of Keras's fit, with TensorFlow's wrong ones put right, on any number of replicas.

The model is y = w * x with w = 1, x = 1..8, y = 0, mean squared error and SGD(0.01).
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest
from model_factory import Scale, compile_model

import distribute_jax as dj

pytestmark = pytest.mark.filterwarnings("ignore:The global batch has")

X = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1)
Y = np.zeros((8, 1), np.float32)


def make_model(strategy: dj.Strategy, **options: Any) -> dj.Model:
    return compile_model(strategy, Scale, **options)


def fit(model: dj.Model, n: int, batch_size: int, **options: Any) -> float:
    options = {"epochs": 1, "shuffle": False, "verbose": 0, **options}
    history = model.fit(X[:n], Y[:n], batch_size=batch_size, **options)
    return float(history.history["loss"][-1])


def w(model: dj.Model) -> float:
    return float(model.get_weights()[0][0])


def test_whole_and_partial_batches_train_as_on_one_device(strategy: dj.MirroredStrategy):
    """TensorFlow's w: 0.59075 for 6 examples on 4 replicas; 0.6375 and 0.74375 for 5 on 2 and 4."""
    model = make_model(strategy)
    expected = [(8, 8, 25.5, 0.49), (6, 4, 12.345417, 0.3315), (5, 4, 9.6125, 0.425)]
    for n, size, loss, weight in expected:
        model.set_weights([np.ones(1)])
        assert fit(model, n, size) == pytest.approx(loss, rel=1e-6)
        assert w(model) == pytest.approx(weight, rel=1e-5)


def test_fewer_examples_than_replicas_in_every_batch(strategy: dj.MirroredStrategy):
    """Six steps on batches of 2; TensorFlow's w on 4 replicas is 0.2200389."""
    model = make_model(strategy)
    batches = [(X[2 * i : 2 * i + 2], Y[2 * i : 2 * i + 2]) for i in (0, 1, 2, 3, 0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # idle replicas are named once
        model.fit(batches, verbose=0)
    assert w(model) == pytest.approx(-0.0257382, rel=1e-5)


def test_evaluate_and_predict_see_every_example_once(strategy: dj.MirroredStrategy):
    model = make_model(strategy, metrics=["mae"])
    assert model.evaluate(X[:7], Y[:7], batch_size=4) == pytest.approx([20.0, 4.0])
    assert model.evaluate(X[:7], Y[:7], batch_size=4, return_dict=True) == pytest.approx(
        {"loss": 20.0, "mae": 4.0}
    )
    np.testing.assert_array_equal(model.predict(X[:7], batch_size=4), X[:7])


@pytest.mark.exhaustive
def test_evaluation_of_a_partial_batch_with_64_bit_numbers(s2: dj.MirroredStrategy):
    with jax.enable_x64(True):
        model = make_model(s2, metrics=["mae"])
        assert model.evaluate(X[:7], Y[:7], batch_size=4) == pytest.approx([20.0, 4.0])


def test_sample_weights_scale_the_terms(strategy: dj.MirroredStrategy):
    """The divisor stays the number of examples; only weighted metrics use the weights."""
    weight = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32)
    model = make_model(strategy, metrics=["mae"], weighted_metrics=["mae"])
    logs = model.evaluate(X, Y, sample_weight=weight, batch_size=8)
    assert logs == pytest.approx([3.75, 4.5, 2.5])
    assert fit(model, 8, 8, sample_weight=weight) == pytest.approx(3.75)
    assert w(model) == pytest.approx(0.925)


def test_a_summed_loss_is_summed(strategy: dj.MirroredStrategy):
    model = make_model(strategy, loss=dj.losses.MeanSquaredError(reduction="sum"))
    assert fit(model, 8, 8) == pytest.approx(204.0)
    assert w(model) == pytest.approx(-3.08)


def test_adam_sees_the_gradient_of_the_global_batch(strategy: dj.MirroredStrategy):
    model = make_model(strategy, optimizer=optax.adam(0.1, eps=1e-7))
    fit(model, 8, 4)
    assert w(model) == pytest.approx(0.8143145, rel=1e-6)


class Ends(dj.callbacks.Callback):
    """Records which batches end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(batch)


@pytest.mark.exhaustive
def test_several_steps_in_one_dispatch_change_nothing_but_the_callbacks(
    strategy: dj.MirroredStrategy,
):
    batches = [(X[i : i + 2], Y[i : i + 2]) for i in (0, 2, 4, 6, 0, 2)]
    one, three = make_model(strategy), make_model(strategy, steps_per_execution=3)
    ends = Ends()
    if strategy.num_replicas_in_sync > 2:
        batches = [(np.concatenate([x] * 4), np.concatenate([y] * 4)) for x, y in batches]
    one.fit(batches, verbose=0)
    three.fit(batches, verbose=0, callbacks=[ends])
    assert ends.ends == [2, 5]
    assert int(three.optimizer.step[...]) == 6
    # In a loop XLA may round a product and its sum once instead of twice.
    assert w(three) == pytest.approx(w(one), rel=1e-6)
