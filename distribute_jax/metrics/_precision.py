"""Precision and recall."""

from __future__ import annotations

from typing import Any

import jax

from distribute_jax._fitting import promoting
from distribute_jax.metrics._confusion import Confusion, checked_thresholds, share


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
        """Starts with nothing; see the class for the argument."""
        super().__init__(checked_thresholds("Precision", thresholds))

    @promoting
    def compute(self) -> jax.Array:
        """Gives the precision, one for each threshold if there are several; 0 without a yes."""
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
        """Starts with nothing; see the class for the argument."""
        super().__init__(checked_thresholds("Recall", thresholds))

    @promoting
    def compute(self) -> jax.Array:
        """Gives the recall, one for each threshold if there are several; 0 without a label of yes."""
        return _one(share(self.true_positives[...], self.false_negatives[...]))


def _one(values: jax.Array) -> jax.Array:
    return values[0] if len(values) == 1 else values
