"""Metrics from counts of true and false positives and negatives: precision, recall, AUC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import promoting
from distribute_jax.metrics._metric import Metric, as_array, check_real, terms


class Confusion(Metric):
    """The counts at each threshold, of which subclasses make one number.

    Args:
        thresholds: a prediction above it says yes.

    Attributes:
        true_positives: the weight of ones above each threshold, float32.
        false_positives: that of zeros above it.
        false_negatives: that of ones not above it.
        true_negatives: that of zeros not above it.
    """

    def __init__(self, thresholds: Sequence[float]) -> None:
        self.thresholds = tuple(float(threshold) for threshold in thresholds)
        self.true_positives = self._zeros()
        self.false_positives = self._zeros()
        self.false_negatives = self._zeros()
        self.true_negatives = self._zeros()

    def _zeros(self) -> nnx.Variable[jax.Array]:
        return nnx.metrics.MetricState(jnp.zeros(len(self.thresholds), jnp.float32))

    @promoting
    def update(  # type: ignore[override]  # the counts are made of two arguments
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
            predictions: probabilities of yes, shape (batch, ...).
            labels: 0 or 1, of the same shape; a last dim of 1 may be missing in one of the two.
            mask: bools, True where a prediction counts; dims match those of the predictions from the
                left.
            sample_weight: how much each prediction counts; dims match from the left.
            _: keywords for other metrics.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        found = terms(self, "predictions", predictions, mask, sample_weight)
        labels = self._matching(labels, found.values.shape)
        values, ones = found.values.ravel(), jnp.ravel(labels > 0)
        above = (values[:, None] > jnp.asarray(self.thresholds)).astype(jnp.float32)
        yes = jnp.where(ones, found.weights.ravel(), 0)
        no = jnp.where(ones, 0, found.weights.ravel())
        # Accelerators would round the weights to bfloat16.
        right = jnp.dot(yes, above, precision="highest")
        wrong = jnp.dot(no, above, precision="highest")
        self.true_positives[...] += right
        self.false_positives[...] += wrong
        self.false_negatives[...] += jnp.sum(yes) - right
        self.true_negatives[...] += jnp.sum(no) - wrong

    def _matching(self, labels: Any, shape: tuple[int, ...]) -> jax.Array:
        made = as_array(self, "labels", labels)
        check_real(self, "labels", made)
        if shape not in (made.shape, (*made.shape, 1)) and made.shape != (*shape, 1):
            raise ArgumentError(
                f"{type(self).__name__}.update got predictions of shape {shape} for labels of shape "
                f"{made.shape}. They have one shape; for one of several classes pass that class of "
                "both, predictions[:, 1] and labels == 1."
            )
        return made


def share(part: jax.Array, rest: jax.Array) -> jax.Array:
    """Returns ``part / (part + rest)``, and 0 where both are 0, as Keras does."""
    total = part + rest
    return jnp.where(total == 0, 0, part / jnp.where(total == 0, 1, total))


def checked_thresholds(metric: str, thresholds: Any) -> tuple[float, ...]:
    """Makes thresholds of one number, several, or None for 0.5."""
    given = thresholds if isinstance(thresholds, (list, tuple)) else [thresholds]
    made = [0.5 if thresholds is None else threshold for threshold in given]
    bad = [
        t for t in made if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t <= 1
    ]
    if bad or not made:
        raise ArgumentError(
            f"{metric}(thresholds={thresholds!r:.60}): a threshold is a probability, 0 to 1. Pass one, a "
            "list of them, or nothing for 0.5."
        )
    return tuple(made)


class Precision(Confusion):
    """The share of predictions of yes that are right, since the last reset, over all replicas.

    Args:
        thresholds: above which a probability says yes: a number, several, or None for 0.5.

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

    def __init__(self, thresholds: Any = None) -> None:
        super().__init__(checked_thresholds("Precision", thresholds))

    @promoting
    def compute(self) -> jax.Array:
        """Returns the precision, one for each threshold if there are several; 0 without a yes."""
        return _one(share(self.true_positives[...], self.false_positives[...]))


class Recall(Confusion):
    """The share of labels of yes that were predicted, since the last reset, over all replicas.

    Args:
        thresholds: above which a probability says yes: a number, several, or None for 0.5.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Recall(thresholds=[0.5, 0.85])
        >>> metric.update(predictions=jnp.array([0.9, 0.8, 0.2]), labels=jnp.array([1, 1, 1]))
        >>> [round(recall, 4) for recall in metric.compute().tolist()]
        [0.6667, 0.3333]

    Source: https://keras.io/api/metrics/classification_metrics/
    """

    def __init__(self, thresholds: Any = None) -> None:
        super().__init__(checked_thresholds("Recall", thresholds))

    @promoting
    def compute(self) -> jax.Array:
        """Returns the recall, one for each threshold if there are several; 0 without a label of yes."""
        return _one(share(self.true_positives[...], self.false_negatives[...]))


def _one(values: jax.Array) -> jax.Array:
    return values[0] if len(values) == 1 else values


_EPSILON = 1e-7
"""How far the outer thresholds lie outside of 0 to 1, so that every probability is between them."""


class AUC(Confusion):
    """The area under the ROC or the precision-recall curve, since the last reset, over all replicas.

    The curve is drawn from the counts at equally spaced thresholds, as in Keras.

    Args:
        num_thresholds: how many.
        curve: ``"ROC"``, recall against the share of zeros above the threshold; or ``"PR"``, precision
            against recall, interpolated between thresholds as Davis and Goadrich (2006) do.
        from_logits: whether predictions are logits.

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
        self, num_thresholds: int = 200, curve: str = "ROC", *, from_logits: bool = False
    ) -> None:
        if (
            isinstance(num_thresholds, bool)
            or not isinstance(num_thresholds, int)
            or num_thresholds < 2
        ):
            raise ArgumentError(
                f"AUC(num_thresholds={num_thresholds!r}): at least 2. Leave it out for 200."
            )
        if curve not in ("ROC", "PR"):
            raise ArgumentError(f"AUC(curve={curve!r}): the curves are 'ROC' and 'PR'.")
        between = [i / (num_thresholds - 1) for i in range(1, num_thresholds - 1)]
        super().__init__([-_EPSILON, *between, 1 + _EPSILON])
        self.curve = curve
        self.from_logits = from_logits

    def update(  # type: ignore[override]  # the counts are made of two arguments
        self,
        *,
        predictions: Any,
        labels: Any,
        mask: Any = None,
        sample_weight: Any = None,
        **_: Any,
    ) -> None:
        """Adds predictions, inside ``run`` this replica's; see ``Precision.update``.

        Args:
            predictions: probabilities of yes, or logits, shape (batch, ...).
            labels: as there.
            mask: as there.
            sample_weight: as there.
            _: keywords for other metrics.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        if self.from_logits:
            predictions = jax.nn.sigmoid(as_array(self, "predictions", predictions))
        super().update(
            predictions=predictions, labels=labels, mask=mask, sample_weight=sample_weight
        )

    @promoting
    def compute(self) -> jax.Array:
        """Returns the area, a float32 scalar; 0 where there are no ones, or for ROC no zeros."""
        right, wrong = self.true_positives[...], self.false_positives[...]
        if self.curve == "PR":
            return _under_precision_recall(right, wrong, self.false_negatives[...])
        recall = share(right, self.false_negatives[...])
        x = share(wrong, self.true_negatives[...])
        return jnp.sum((x[:-1] - x[1:]) * (recall[:-1] + recall[1:]) / 2)


def _under_precision_recall(right: jax.Array, wrong: jax.Array, missed: jax.Array) -> jax.Array:
    """Integrates precision over recall, with both counts changing linearly between thresholds."""
    more = right[:-1] - right[1:]
    above = right + wrong
    slope = share(more, above[:-1] - above[1:] - more)
    start = right[1:] - slope * above[1:]
    both = (above[:-1] > 0) & (above[1:] > 0)
    logs = jnp.where(
        both, jnp.log(jnp.where(both, above[:-1] / jnp.where(both, above[1:], 1), 1)), 0
    )
    ones = right[1:] + missed[1:]
    areas = slope * (more + start * logs) / jnp.where(ones == 0, 1, ones)
    return jnp.sum(areas)
