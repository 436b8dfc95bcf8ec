"""Metrics from counts of true and false positives and negatives: precision, recall, AUC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._checks import check_choice, check_int, is_real, refuse
from distribute_jax._messages import promoting
from distribute_jax.losses._shapes import pair
from distribute_jax.metrics._metric import Metric, as_array, terms

_ONE_CLASS = (
    "Shapes must be equal; for one of several classes pass predictions[:, 1] and labels == 1."
)


class Confusion(Metric):
    """The sums of weights of true and false positives and negatives at each threshold, float32."""

    true_positives: nnx.Variable[jax.Array]
    false_positives: nnx.Variable[jax.Array]
    false_negatives: nnx.Variable[jax.Array]
    true_negatives: nnx.Variable[jax.Array]

    def __init__(self, thresholds: Sequence[float], name: str | None = None) -> None:
        super().__init__(name)
        self.thresholds = tuple(float(threshold) for threshold in thresholds)
        for name in ("true_positives", "false_positives", "false_negatives", "true_negatives"):
            zeros = jnp.zeros(len(self.thresholds), jnp.float32)
            setattr(self, name, nnx.metrics.MetricState(zeros))

    @promoting
    def update(  # type: ignore[override]  # the counts are computed from two arguments
        self,
        *,
        predictions: Any,
        labels: Any,
        mask: Any = None,
        sample_weight: Any = None,
        **_: Any,
    ) -> None:
        """Adds predictions, inside ``run`` this replica's.

        Args:
            predictions: probabilities of the label 1, shape (batch, ...); logits for
                ``AUC(from_logits=True)``.
            labels: 0 or 1, of the same shape; a last dim of 1 may be missing in one of the two.
            mask: bools, True where a prediction counts; dims match those of the predictions from the
                left.
            sample_weight: how much each prediction counts; dims match from the left.
            _: keywords for other metrics.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        name, probabilities = f"{type(self).__name__}.update", self._probabilities(predictions)
        labels, probabilities = pair(name, labels, probabilities, _ONE_CLASS)
        new = terms(self, "predictions", probabilities, mask, sample_weight)
        values, ones = new.values.ravel(), jnp.ravel(labels > 0)
        # Of the values' dtype: a prediction of 0.3 is not above 0.3 with jax_enable_x64 either.
        thresholds = jnp.asarray(self.thresholds, values.dtype)
        is_positive = (values[:, None] > thresholds).astype(jnp.float32)
        weights_of_ones = jnp.where(ones, new.weights.ravel(), 0)
        weights_of_zeros = jnp.where(ones, 0, new.weights.ravel())
        # With the default precision, accelerators would round the weights to bfloat16.
        true_positives = jnp.dot(weights_of_ones, is_positive, precision="highest")
        false_positives = jnp.dot(weights_of_zeros, is_positive, precision="highest")
        self.true_positives[...] += true_positives
        self.false_positives[...] += false_positives
        self.false_negatives[...] += jnp.sum(weights_of_ones) - true_positives
        self.true_negatives[...] += jnp.sum(weights_of_zeros) - false_positives

    def _probabilities(self, predictions: Any) -> Any:
        return predictions


def fraction(part: jax.Array, rest: jax.Array) -> jax.Array:
    """Returns ``part / (part + rest)``, and 0 if both are 0, as in Keras."""
    total = part + rest
    return jnp.where(total == 0, 0, part / jnp.where(total == 0, 1, total))


class AtThresholds(Confusion):
    """A value for each threshold that the user chose."""

    def __init__(self, thresholds: Any = None, *, name: str | None = None) -> None:
        listed = thresholds if isinstance(thresholds, (list, tuple)) else [thresholds]
        numbers = [0.5 if threshold is None else threshold for threshold in listed]
        if not numbers or not all(is_real(number) and 0 <= number <= 1 for number in numbers):
            wanted = "a number between 0 and 1, a list of them, or None for 0.5"
            refuse(f"{type(self).__name__}: thresholds", wanted, thresholds)
        super().__init__(numbers, name)


class Precision(AtThresholds):
    """The fraction of positive predictions that are correct, since the last reset, over all replicas.

    Args:
        thresholds: the probability above which a prediction is positive: a number, a list, or None for 0.5.
        name: the name under which ``fit`` reports it.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Precision()
        >>> metric.update(
        ...     predictions=jnp.array([0.9, 0.8, 0.2, 0.6]), labels=jnp.array([1, 1, 1, 0])
        ... )
        >>> round(float(metric.compute()), 4)
        0.6667

    Source: https://keras.io/api/metrics/classification_metrics/
    """

    @promoting
    def compute(self) -> jax.Array:
        """Returns the precision, one for each threshold if there are several; 0 without positives."""
        return _scalar_if_single(fraction(self.true_positives[...], self.false_positives[...]))


class Recall(AtThresholds):
    """The fraction of positive labels that are predicted, since the last reset, over all replicas.

    Args:
        thresholds: the probability above which a prediction is positive: a number, a list, or None for 0.5.
        name: the name under which ``fit`` reports it.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Recall(thresholds=[0.5, 0.85])
        >>> metric.update(predictions=jnp.array([0.9, 0.8, 0.2]), labels=jnp.array([1, 1, 1]))
        >>> [round(recall, 4) for recall in metric.compute().tolist()]
        [0.6667, 0.3333]

    Source: https://keras.io/api/metrics/classification_metrics/
    """

    @promoting
    def compute(self) -> jax.Array:
        """Returns the recall, one for each threshold if there are several; 0 without positive labels."""
        return _scalar_if_single(fraction(self.true_positives[...], self.false_negatives[...]))


def _scalar_if_single(values: jax.Array) -> jax.Array:
    return values[0] if len(values) == 1 else values


class TruePositives(AtThresholds):
    """The number of positive labels predicted as positive, or the sum of their sample weights.

    Args:
        thresholds: the probability above which a prediction is positive: a number, a list, or None for 0.5.
        name: the name under which ``fit`` reports it.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.TruePositives()
        >>> metric.update_state(jnp.array([1, 1, 0]), jnp.array([0.9, 0.2, 0.4]))
        >>> float(metric.result())
        1.0

    Source: https://keras.io/api/metrics/classification_metrics/
    """

    _counts: ClassVar[str] = "true_positives"

    def compute(self) -> jax.Array:
        """Returns the count, float32, one for each threshold if there are several."""
        return _scalar_if_single(jnp.copy(getattr(self, self._counts)[...]))


class TrueNegatives(TruePositives):
    """The number of negative labels predicted as negative; see ``TruePositives``."""

    _counts = "true_negatives"


class FalsePositives(TruePositives):
    """The number of negative labels predicted as positive; see ``TruePositives``."""

    _counts = "false_positives"


class FalseNegatives(TruePositives):
    """The number of positive labels predicted as negative; see ``TruePositives``."""

    _counts = "false_negatives"


_EPSILON = 1e-7
"""How far the outer thresholds are outside of 0 to 1, so that every probability is between them."""


class AUC(Confusion):
    """The area under the ROC or the precision-recall curve, since the last reset, over all replicas.

    The curve is drawn from the counts at equally spaced thresholds, as in Keras.

    Args:
        num_thresholds: the number of thresholds.
        curve: ``"ROC"``, the true against the false positive rate; or ``"PR"``, precision
            against recall, interpolated between thresholds as Davis and Goadrich (2006) do.
        from_logits: whether predictions are logits.
        name: the name under which ``fit`` reports it.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.AUC()
        >>> metric.update(
        ...     predictions=jnp.array([0.0, 0.5, 0.3, 0.9]), labels=jnp.array([0, 0, 1, 1])
        ... )
        >>> float(metric.compute())
        0.75

    Source: https://keras.io/api/metrics/classification_metrics/
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        *,
        from_logits: bool = False,
        name: str | None = None,
    ) -> None:
        check_int("AUC: num_thresholds", num_thresholds, 2)
        check_choice("AUC: curve", curve, ("ROC", "PR"))
        between = [i / (num_thresholds - 1) for i in range(1, num_thresholds - 1)]
        super().__init__([-_EPSILON, *between, 1 + _EPSILON], name)
        self.curve = curve
        self.from_logits = from_logits

    def _probabilities(self, predictions: Any) -> Any:
        if not self.from_logits:
            return predictions
        # bfloat16 could not tell probabilities near 1 from each other.
        return jax.nn.sigmoid(as_array(self, "predictions", predictions).astype(jnp.float32))

    @promoting
    def compute(self) -> jax.Array:
        """Returns the area, a float32 scalar; 0 without ones, and for ROC without zeros."""
        tp, fp, fn = self.true_positives[...], self.false_positives[...], self.false_negatives[...]
        if self.curve == "PR":
            return _area_under_precision_recall(tp, fp, fn)
        recall, fall_out = fraction(tp, fn), fraction(fp, self.true_negatives[...])
        return jnp.sum((fall_out[:-1] - fall_out[1:]) * (recall[:-1] + recall[1:]) / 2)


def _area_under_precision_recall(tp: jax.Array, fp: jax.Array, fn: jax.Array) -> jax.Array:
    """Integrates precision over recall, with both counts linear between thresholds."""
    tp_step = tp[:-1] - tp[1:]
    positives = tp + fp
    slope = fraction(tp_step, positives[:-1] - positives[1:] - tp_step)
    intercept = tp[1:] - slope * positives[1:]
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = jnp.where(both, positives[:-1] / jnp.where(both, positives[1:], 1), 1)
    logs = jnp.where(both, jnp.log(ratio), 0)
    ones = tp[1:] + fn[1:]
    return jnp.sum(slope * (tp_step + intercept * logs) / jnp.where(ones == 0, 1, ones))
