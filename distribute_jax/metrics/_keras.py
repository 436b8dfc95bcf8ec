"""Keras's metrics that are means over examples: of values, accuracies and losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from distribute_jax import losses
from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import not_a_name, promoting, real_array
from distribute_jax.losses._crossentropy import class_numbers
from distribute_jax.losses._get import BY_CLASS_NAME, BY_NAME, FunctionLoss
from distribute_jax.losses._loss import OfFormula
from distribute_jax.losses._shapes import pair, predictions
from distribute_jax.metrics._confusion import AUC, Precision, Recall
from distribute_jax.metrics._means import Average
from distribute_jax.metrics._metric import Metric, in_snake_case


class Mean(Average):
    """The mean of all values since the last reset: Keras's name for ``Average``.

    Args:
        name: the name under which ``fit`` reports it.
        dtype: has no effect: sums are float32.

    Example:
        >>> import distribute_jax as dj
        >>> mean = dj.metrics.Mean(name="loss")
        >>> mean.update_state([1.0, 2.0, 6.0])
        >>> float(mean.result())
        3.0

    Source: https://keras.io/api/metrics/reduction_metrics/
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__()
        self.name = name or in_snake_case(type(self))


class Sum(Mean):
    """The sum of all values since the last reset, times their sample weights; see ``Mean``."""

    @promoting
    def compute(self) -> jax.Array:
        """Returns the sum, a float32 scalar."""
        return jnp.copy(self.total[...])


class MeanMetricWrapper(Average):
    """The mean over all examples since the last reset of a function of labels and predictions.

    Args:
        fn: takes labels and predictions, and returns a value for each example.
        name: the name under which ``fit`` reports it.
        dtype: has no effect: sums are float32.
        **kwargs: further arguments of ``fn``.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> largest = dj.metrics.MeanMetricWrapper(lambda y_true, y_pred: jnp.max(y_pred, axis=-1))
        >>> largest.update_state(jnp.array([0, 1]), jnp.array([[1.0, 2.0], [4.0, 3.0]]))
        >>> float(largest.result())
        3.0

    Source: https://keras.io/api/metrics/base_metric/
    """

    update_state = Metric.update_state  # type: ignore[assignment]  # two arguments again

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.name = name or in_snake_case(type(self))
        if kwargs:
            inspect.signature(fn).bind(None, None, **kwargs)
            fn = partial(fn, **kwargs)
        self._loss = fn if isinstance(fn, losses.Loss) else FunctionLoss(fn, what="metric")

    @promoting
    def update(  # type: ignore[override]  # the values are computed from two arguments
        self,
        *,
        labels: Any,
        predictions: Any,
        mask: Any = None,
        sample_weight: Any = None,
        **_: Any,
    ) -> None:
        """Adds predictions, inside ``run`` this replica's.

        Args:
            labels: the labels, dim 0 the batch.
            predictions: the predictions, dim 0 the batch.
            mask: bools, True where a value counts; dims match those of the values from the left.
            sample_weight: how much each value counts; dims match from the left.
            _: keywords for other metrics.
        """
        self._add("values", self._loss.per_example(labels, predictions), mask, sample_weight)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> jax.Array:
    """Returns the fraction of the last dim where the prediction is above the threshold iff the label is 1."""
    labels, predicted = pair("binary_accuracy", y_true, y_pred)
    return jnp.mean(
        labels == (predicted > jnp.asarray(threshold, predicted.dtype)), axis=-1, dtype=jnp.float32
    )


def accuracy(name: str, y_true: Any, y_pred: Any) -> jax.Array:
    """Returns 1 where the largest prediction is that of the true class, else 0."""
    labels, predicted = _classes(name, y_true, y_pred)
    return (jnp.argmax(predicted, axis=-1) == labels).astype(jnp.float32)


def top_k(name: str, y_true: Any, y_pred: Any, k: int = 5) -> jax.Array:
    """Returns 1 where fewer than k predictions exceed that of the true class, as in Keras, else 0."""
    labels, predicted = _classes(name, y_true, y_pred)
    classes = predicted.shape[-1]
    indices = jnp.clip(labels, 0, classes - 1)[..., None]
    of_label = jnp.take_along_axis(predicted, indices, axis=-1)
    larger = jnp.sum(predicted > of_label, axis=-1)
    is_valid = (labels >= 0) & (labels < classes) & jnp.isfinite(of_label[..., 0])
    return (is_valid & (larger < k)).astype(jnp.float32)


def _classes(name: str, y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    """Returns class numbers and predictions; labels are one-hot unless the name begins with ``sparse_``."""
    if name.startswith("sparse_"):
        predicted = predictions(name, y_pred)
        return class_numbers(name, y_true, predicted, -1), predicted
    labels, predicted = pair(name, y_true, y_pred, f"For class numbers use sparse_{name}.")
    return jnp.argmax(labels, axis=-1), predicted


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> jax.Array:
    """Returns the cosine of the angle between labels and predictions; the loss is its negative."""
    return -losses.cosine_similarity(y_true, y_pred, axis)


class BinaryAccuracy(MeanMetricWrapper):
    """The fraction of predictions that are above the threshold if and only if the label is 1.

    For logits pass ``threshold=0``.

    Args:
        name: the name under which ``fit`` reports it.
        dtype: has no effect: sums are float32.
        threshold: the prediction above which the class is 1.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.BinaryAccuracy()
        >>> metric.update_state(jnp.array([1, 1, 0, 0]), jnp.array([0.9, 0.2, 0.1, 0.4]))
        >>> float(metric.result())
        0.75

    Source: https://keras.io/api/metrics/accuracy_metrics/
    """

    def __init__(self, name: str | None = None, dtype: Any = None, threshold: float = 0.5) -> None:
        super().__init__(binary_accuracy, name, dtype, threshold=threshold)


class CategoricalAccuracy(MeanMetricWrapper):
    """The fraction of examples whose largest prediction is that of the true class; labels are one-hot.

    Args:
        name: the name under which ``fit`` reports it.
        dtype: has no effect: sums are float32.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.CategoricalAccuracy(name="accuracy")
        >>> metric.update_state(jnp.array([[1, 0], [1, 0]]), jnp.array([[2.0, 1.0], [0.0, 3.0]]))
        >>> float(metric.result())
        0.5

    Source: https://keras.io/api/metrics/accuracy_metrics/
    """

    _of: ClassVar[str] = "categorical_accuracy"

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(partial(accuracy, self._of), name, dtype)


class SparseCategoricalAccuracy(CategoricalAccuracy):
    """As ``CategoricalAccuracy``, for labels that are class numbers."""

    _of = "sparse_categorical_accuracy"


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """The fraction of examples whose true class is among the k largest predictions; labels are one-hot.

    Args:
        k: how many predictions.
        name: the name under which ``fit`` reports it.
        dtype: has no effect: sums are float32.

    Source: https://keras.io/api/metrics/accuracy_metrics/
    """

    _of: ClassVar[str] = "top_k_categorical_accuracy"

    def __init__(self, k: int = 5, name: str | None = None, dtype: Any = None) -> None:
        check_int(f"{type(self).__name__}: k", k, below=1 << 31)
        super().__init__(partial(top_k, self._of), name, dtype, k=k)


class SparseTopKCategoricalAccuracy(TopKCategoricalAccuracy):
    """As ``TopKCategoricalAccuracy``, for labels that are class numbers."""

    _of = "sparse_top_k_categorical_accuracy"


class _MeanOfFormula(OfFormula, MeanMetricWrapper):
    """The mean of a loss function over all examples; takes the options of the function."""

    def __init__(self, name: str | None = None, dtype: Any = None, **options: Any) -> None:
        super().__init__(type(self).formula, name, dtype, **options)


class MeanSquaredError(_MeanOfFormula, formula=losses.mean_squared_error):
    """The mean of ``dj.losses.mean_squared_error`` over all examples since the last reset.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.MeanSquaredError()
        >>> metric.update_state(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0]))
        >>> float(metric.result())
        2.0

    Source: https://keras.io/api/metrics/regression_metrics/
    """


class RootMeanSquaredError(MeanSquaredError):
    """The square root of ``MeanSquaredError``."""

    @promoting
    def compute(self) -> jax.Array:
        return jnp.sqrt(super().compute())


class MeanAbsoluteError(_MeanOfFormula, formula=losses.mean_absolute_error):
    """The mean of ``dj.losses.mean_absolute_error`` over all examples since the last reset."""


class MeanAbsolutePercentageError(_MeanOfFormula, formula=losses.mean_absolute_percentage_error):
    """The mean of ``dj.losses.mean_absolute_percentage_error`` over all examples."""


class MeanSquaredLogarithmicError(_MeanOfFormula, formula=losses.mean_squared_logarithmic_error):
    """The mean of ``dj.losses.mean_squared_logarithmic_error`` over all examples."""


class CosineSimilarity(_MeanOfFormula, formula=cosine_similarity):
    """The mean cosine of the angle between labels and predictions; takes ``axis=-1``."""


class LogCoshError(_MeanOfFormula, formula=losses.log_cosh):
    """The mean of ``dj.losses.log_cosh`` over all examples since the last reset."""


class KLDivergence(_MeanOfFormula, formula=losses.kl_divergence):
    """The mean of ``dj.losses.kl_divergence`` over all examples since the last reset."""


class Poisson(_MeanOfFormula, formula=losses.poisson):
    """The mean of ``dj.losses.poisson`` over all examples since the last reset."""


class Hinge(_MeanOfFormula, formula=losses.hinge):
    """The mean of ``dj.losses.hinge`` over all examples since the last reset."""


class SquaredHinge(_MeanOfFormula, formula=losses.squared_hinge):
    """The mean of ``dj.losses.squared_hinge`` over all examples since the last reset."""


class CategoricalHinge(_MeanOfFormula, formula=losses.categorical_hinge):
    """The mean of ``dj.losses.categorical_hinge`` over all examples since the last reset."""


class BinaryCrossentropy(_MeanOfFormula, formula=losses.binary_crossentropy):
    """The mean of ``dj.losses.binary_crossentropy``; takes ``from_logits``, ``label_smoothing``, ``axis``."""


class CategoricalCrossentropy(_MeanOfFormula, formula=losses.categorical_crossentropy):
    """The mean of ``dj.losses.categorical_crossentropy``; options as ``BinaryCrossentropy``."""


class SparseCategoricalCrossentropy(_MeanOfFormula):
    """The mean of ``dj.losses.sparse_categorical_crossentropy``; takes ``from_logits`` and ``axis``."""

    @staticmethod
    def formula(y_true: Any, y_pred: Any, from_logits: bool = False, axis: int = -1) -> jax.Array:
        """Returns the loss of each example, without ``ignore_class``, since ignored examples would count."""
        return losses.sparse_categorical_crossentropy(
            y_true, y_pred, from_logits=from_logits, axis=axis
        )


_METRICS = {
    name: cls
    for cls in (
        *(BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy, CosineSimilarity),
        *(TopKCategoricalAccuracy, SparseTopKCategoricalAccuracy, AUC, Precision, Recall),
    )
    for name in (in_snake_case(cls), cls.__name__)
}
"""The metrics that strings stand for, beside losses and ``"accuracy"``; "AUC" may be written in any case."""
_NAMES = {"accuracy", "acc", *BY_NAME, *(in_snake_case(cls) for cls in _METRICS.values())}


class _Accuracy(losses.Loss):
    """The accuracy that Keras uses for the shapes of labels and predictions.

    Predictions of one number per example are binary; labels with one dim less, or of one number per
    example, are class numbers; others are one-hot.
    """

    def __init__(self, name: str, threshold: float) -> None:
        super().__init__(name)
        self.threshold = threshold

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        true = real_array(self.name, "y_true", y_true).shape
        predicted = real_array(self.name, "y_pred", y_pred).shape
        if len(predicted) < 2 or predicted[-1] == 1:
            return binary_accuracy(y_true, y_pred, self.threshold)
        is_sparse = len(true) < len(predicted) or true[-1] == 1
        return accuracy("sparse_" * is_sparse + "categorical_accuracy", y_true, y_pred)


def from_name(name: str, *, from_logits: bool) -> Metric:
    """Returns the metric of a name in Keras, for probabilities or logits.

    For logits the threshold of two classes is 0, and ``"AUC"`` and cross-entropies are those of logits.
    ``"cosine_similarity"`` is positive for vectors that agree, and the loss of that name negative, as in
    Keras.
    """
    threshold = 0.0 if from_logits else 0.5
    if name.lower() in ("accuracy", "acc"):
        return MeanMetricWrapper(_Accuracy(name, threshold))
    cls = _METRICS.get(name) or _METRICS.get(name.lower())
    if cls is AUC:
        return AUC(from_logits=from_logits)
    if cls in (Precision, Recall):
        return cls(threshold)
    if cls is not None:
        return BinaryAccuracy(threshold=threshold) if cls is BinaryAccuracy else cls()
    if name not in BY_NAME and name not in BY_CLASS_NAME:
        raise ArgumentError(
            f"{not_a_name('a metric', name, _NAMES)} Or pass a function of (y_true, y_pred), or a metric of "
            "dj.metrics."
        )
    loss = losses.get(name)
    if hasattr(loss, "from_logits"):
        loss.from_logits = from_logits
    return MeanMetricWrapper(loss)
