"""Metrics by Keras's names: the formula of each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import sum_on_read

import distribute_jax as dj
from distribute_jax import losses
from distribute_jax.training._tracker import find_metric

IDS = np.array([0, 1, 6, 3])
ONE_HOT = np.eye(7, dtype=np.float32)[IDS]
SCORES = np.tile(np.arange(7.0, dtype=np.float32), (4, 1))
"""Class 6 scores most, then 5 and so on to 0."""
BITS = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], np.float32)
SURE = np.array([[0.9, 0.1], [0.4, 0.6], [0.6, 0.5], [0.2, 0.7]], np.float32)
LOGIT = losses.BinaryCrossentropy(from_logits=True)

CASES: dict[str, tuple[str, Any, Any, Any, list[float]]] = {
    "class numbers": ("accuracy", None, IDS, SCORES, [0, 0, 1, 0]),
    "class numbers with a dim": ("acc", None, IDS[:, None], SCORES, [0, 0, 1, 0]),
    "one-hot": ("Accuracy", None, ONE_HOT, SCORES, [0, 0, 1, 0]),
    "one number": ("accuracy", None, BITS[:, :1], SURE[:, :1], [1, 1, 1, 1]),
    "no dim": ("accuracy", None, BITS[:, 1], SURE[:, 1], [1, 1, 0, 0]),
    "no dim of labels": ("accuracy", None, BITS[:, 1], SURE[:, 1:], [1, 1, 0, 0]),
    "logits": ("accuracy", LOGIT, BITS[:, 1], SURE[:, 1:] - 0.5, [1, 1, 0, 0]),
    "binary": ("binary_accuracy", None, BITS, SURE, [1, 1, 0.5, 0.5]),
    "binary of logits": ("BinaryAccuracy", LOGIT, BITS, SURE - 0.5, [1, 1, 0.5, 0.5]),
    "categorical": ("CategoricalAccuracy", None, ONE_HOT, SCORES, [0, 0, 1, 0]),
    "sparse": ("sparse_categorical_accuracy", None, IDS, SCORES, [0, 0, 1, 0]),
    "top 5": ("top_k_categorical_accuracy", None, ONE_HOT, SCORES, [0, 0, 1, 1]),
    "sparse top 5": ("SparseTopKCategoricalAccuracy", None, IDS, SCORES, [0, 0, 1, 1]),
    "all within 5": ("sparse_top_k_categorical_accuracy", None, IDS, SCORES[:, :4], [1, 1, 0, 1]),
    "a loss": ("mae", None, BITS, SURE, [0.1, 0.4, 0.45, 0.45]),
    "another name of it": ("mean_absolute_error", None, BITS, SURE, [0.1, 0.4, 0.45, 0.45]),
    "its class": ("MeanAbsoluteError", None, BITS, SURE, [0.1, 0.4, 0.45, 0.45]),
    "cosine": ("cosine_similarity", None, SCORES, 2 * SCORES, [1, 1, 1, 1]),
}


def per_example(identifier: Any, loss: Any = None) -> Any:
    return find_metric(identifier, loss)[1]._loss.per_example


@functools.cache
def computed() -> dict[str, Any]:
    """The values of all cases: one program."""

    def compute(inputs: dict[str, Any]) -> dict[str, Any]:
        return {case: per_example(*CASES[case][:2])(*given) for case, given in inputs.items()}

    return jax.jit(compute)({case: of[2:4] for case, of in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_a_name_is_a_formula_with_one_value_per_example(case: str):
    np.testing.assert_allclose(computed()[case], CASES[case][-1], rtol=1e-6, atol=1e-7)


def test_a_time_dim_is_kept():
    ids, one_hot, y_pred = IDS.reshape(2, 2), ONE_HOT.reshape(2, 2, 7), SCORES.reshape(2, 2, 7)
    for name in ("accuracy", "sparse_top_k_categorical_accuracy"):
        assert jax.eval_shape(per_example(name), ids, y_pred).shape == (2, 2)
    assert jax.eval_shape(per_example("acc"), one_hot, y_pred).shape == (2, 2)


def test_a_crossentropy_beside_a_loss_of_logits_is_of_logits_too():
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    for loss in (sparse, losses.get(optax.softmax_cross_entropy_with_integer_labels)):
        value = per_example("sparse_categorical_crossentropy", loss)
        np.testing.assert_array_equal(value(IDS, SCORES), sparse.per_example(IDS, SCORES))


def test_metrics_of_two_classes_beside_a_loss_of_logits_are_of_logits():
    """The logits are not probabilities, which the thresholds of Keras's defaults compare with."""
    logits, labels = jnp.array([-3.0, -0.2, 0.1, 0.2, 2.0]), jnp.array([0, 1, 0, 1, 1])
    values = {}
    for name in ("AUC", "precision", "Recall"):
        metric = find_metric(name, LOGIT)[1]
        metric.update_state(labels, logits)
        values[name] = float(metric.result())
    expected = {"AUC": 5 / 6, "precision": 2 / 3, "Recall": 2 / 3}
    assert values == pytest.approx(expected)


def test_functions_may_name_their_arguments_in_any_order():
    def away(predictions: Any, labels: Any, scale: float = 1.0) -> Any:
        return scale * (labels - predictions)

    for function in (away, functools.partial(away, scale=1.0)):
        np.testing.assert_array_equal(per_example(function)(BITS, SURE), BITS - SURE)


REFUSED = {
    "a name": ("f1", "accuracy, auc, bce, binary_accuracy"),
    "three arguments": (lambda y_true, y_pred, w: w, "^The metric takes"),
}


@pytest.mark.parametrize(("identifier", "words"), REFUSED.values(), ids=REFUSED)
def test_other_metrics_are_refused(identifier: Any, words: str):
    with pytest.raises(dj.ArgumentError, match=words):
        per_example(identifier)


def test_a_mean_over_the_batch_is_refused():
    with pytest.raises(dj.ArgumentError, match=r"^The metric returned float32\[\] for"):
        per_example(lambda y_true, y_pred: jnp.mean(y_pred))(BITS, SURE)


def test_accuracy_of_a_pytree_is_refused():
    with pytest.raises(dj.ArgumentError, match="which is not an array of numbers"):
        per_example("accuracy")({"a": BITS}, SURE)


class Share(dj.metrics.Metric):
    """The percentage of rows whose label is 1, with Keras's methods and TensorFlow's kind of variable."""

    def __init__(self, name: str = "percent", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.ones = nnx.metrics.MetricState(jnp.zeros(()))
        self.rows = sum_on_read()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        is_real = dj.get_replica_context().batch_mask
        self.ones[...] += jnp.sum((y_true == 1) & is_real)
        self.rows.assign_add(jnp.sum(is_real.astype(jnp.float32)))

    def result(self) -> Any:
        return 100 * self.ones / self.rows.read_value()

    def reset_state(self) -> None:
        super().reset_state()
        self.rows.assign(0.0)


class OfFirst(dj.metrics.Mean):
    """A subclass of another metric: ``fit`` calls what it overrides."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        super().update_state(y_true == 1, sample_weight)

    def result(self) -> Any:
        return 100 * super().result()


def test_fit_calls_the_methods_of_keras_that_a_metric_overrides(s4: dj.Strategy):
    with s4.scope():
        model = dj.Model(nnx.Linear(1, 3, rngs=nnx.Rngs(0)))
        metrics = [Share(), OfFirst(name="same")]
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True), metrics)
    x, y = np.ones((10, 1), np.float32), np.arange(10) % 3
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0).history
    assert history["percent"] == pytest.approx([30, 30])
    assert history["same"] == pytest.approx([30, 30])
    assert float(OfFirst()(y, y)) == pytest.approx(30)
