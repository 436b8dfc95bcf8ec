"""Precision, recall and areas under curves, exact for any number of replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.metrics import AUC, Precision, Recall

LOGITS = np.array(
    [-2.0, -1.0, -0.5, 0.1, 0.3, 0.9, 1.5, 2.5, -0.2, 0.4, 3.0, -3.0, 0.0], np.float32
)
P = np.round(1 / (1 + np.exp(-LOGITS)), 2).astype(np.float32)
LABELS = np.array([0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1], np.int32)
WEIGHTS = np.array([1, 2, 0.5, 1, 1, 3, 1, 1, 2, 1, 1, 0.25, 2], np.float32)

MAKE: dict[str, Any] = {
    "precision": Precision,
    "precisions": lambda: Precision(thresholds=[0.3, 0.6]),
    "recall": Recall,
    "roc": AUC,
    "coarse roc": lambda: AUC(num_thresholds=5),
    "pr": lambda: AUC(curve="PR"),
    "of logits": lambda: AUC(from_logits=True),
}
KERAS: dict[str, tuple[Any, Any]] = {
    "precision": (0.714286, 0.777778),
    "precisions": ([0.7, 0.75], [0.703704, 0.833333]),
    "recall": (0.714286, 0.736842),
    "roc": (0.785714, 0.825771),
    "coarse roc": (0.72619, 0.731397),
    "pr": (0.759749, 0.795937),
    "of logits": (0.785714, 0.825771),
}
"""What Keras 3.15.1 gives for these numbers: without weights, and with them."""


def test_metrics_have_the_names_of_keras() -> None:
    """That of the class in snake case, so that ``{m.name: m.result()}`` has all of them."""
    metrics = [dj.metrics.Mean(), dj.metrics.AUC(), dj.metrics.TopKCategoricalAccuracy()]
    assert [m.name for m in metrics] == ["mean", "auc", "top_k_categorical_accuracy"]
    assert dj.metrics.Precision(name="right").name == "right"


def test_results_without_weights_are_those_of_keras():
    @nnx.jit
    def computed(metrics: dict[str, Any]) -> dict[str, Any]:
        for name, metric in metrics.items():
            given = LOGITS if name == "of logits" else P
            metric.update(predictions=given, labels=LABELS, other=1)
        return {name: metric.compute() for name, metric in metrics.items()}

    found = computed({name: make() for name, make in MAKE.items()})
    for name in MAKE:
        np.testing.assert_allclose(found[name], KERAS[name][0], rtol=1e-5, err_msg=name)
    assert set(KERAS) == set(MAKE)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The global batch has")
def test_results_over_full_and_partial_batches_are_those_of_keras(strategy: dj.Strategy):
    """Eight examples, and five; with weights."""
    names = ("precisions", "recall", "of logits", "pr")
    with strategy.scope():
        metrics = {name: MAKE[name]() for name in names}

    def step(p: Any, logits: Any, labels: Any, w: Any) -> None:
        for name, metric in metrics.items():
            given = logits if name == "of logits" else p
            metric.update(predictions=given[:, None], labels=labels, sample_weight=w)

    data = [(a[:8], a[8:]) for a in (P, LOGITS, LABELS, WEIGHTS)]
    for batch in strategy.distribute_dataset(list(zip(*data, strict=True))):
        strategy.run(step, args=batch)
    for name, metric in metrics.items():
        np.testing.assert_allclose(metric.compute(), KERAS[name][1], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("x64", [False, True])
def test_a_prediction_equal_to_a_threshold_is_negative(x64: bool):
    """Also where thresholds could be float64: float32 rounds 0.3 up."""
    with jax.enable_x64(x64):
        metric = Recall(thresholds=0.3)
        metric.update(predictions=np.array([0.3, 0.4]), labels=np.array([1, 1]))
        assert float(metric.compute()) == 0.5


def test_logits_of_bfloat16_keep_their_order():
    """A threshold is between their probabilities, 0.98901 and 0.98999, which are one bfloat16."""
    metric = AUC(from_logits=True)
    metric.update(predictions=jnp.array([4.5, 4.59375], jnp.bfloat16), labels=np.array([0, 1]))
    assert float(metric.compute()) == 1


@pytest.mark.exhaustive
def test_results_are_zero_without_data_and_after_a_reset():
    for make in MAKE.values():
        metric = make()
        assert not np.any(metric.compute())
        metric.update(predictions=jnp.array([0.9, 0.1]), labels=jnp.array([1, 0]))
        assert np.all(metric.compute() > 0)
        metric.reset()
        assert not np.any(metric.compute())


def test_masked_predictions_do_not_count():
    metric = Precision()
    given = {"predictions": np.float32([0.9, np.nan, 0.8]), "labels": np.array([1, 0, 0])}
    nnx.jit(lambda m: m.update(**given, mask=np.array([True, False, True])))(metric)
    assert float(metric.compute()) == 0.5
    assert float(metric.true_negatives[0]) == 0.0


REFUSED: dict[str, tuple[Any, str]] = {
    "no probability": (lambda: Precision(thresholds=2), "between 0 and 1"),
    "no thresholds": (lambda: Recall(thresholds=[]), "between 0 and 1"),
    "a text": (lambda: Recall(thresholds="half"), "between 0 and 1"),
    "one threshold": (lambda: AUC(num_thresholds=1), "an integer >= 2"),
    "curve": (lambda: AUC(curve="roc"), "one of 'ROC', 'PR'"),
    "classes": (
        lambda: Recall().update(predictions=P[:, None] * [1, 2], labels=LABELS),
        r"y_true of shape \(13,\) and y_pred of shape \(13, 2\)",
    ),
    "one-hot": (
        lambda: Recall().update(predictions=P, labels=np.eye(2)[LABELS]),
        r"y_true of shape \(13, 2\) and y_pred of shape \(13,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_are_refused(case: str):
    make, message = REFUSED[case]
    with pytest.raises(dj.ArgumentError, match=message):
        make()
