"""The area under a curve of right against wrong answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax._fitting import promoting
from distribute_jax.metrics._confusion import Confusion, share
from distribute_jax.metrics._terms import as_array

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
        """Starts with nothing; see the class for the arguments."""
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
        """Gives the area, a float32 scalar; 0 where there are no ones, or for ROC no zeros."""
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
