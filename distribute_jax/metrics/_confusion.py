"""Counts of right and wrong answers to a question of yes or no, at one threshold or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._fitting import promoting
from distribute_jax.metrics._metric import Metric
from distribute_jax.metrics._terms import as_array, check_real, terms


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
        """Starts with nothing; see the class for the argument."""
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
    """Gives ``part / (part + rest)``, and 0 where both are 0, as Keras does."""
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
