"""The mean of values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._fitting import promoting
from distribute_jax.metrics._metric import Metric
from distribute_jax.metrics._terms import taken, terms


class Average(Metric):
    """The mean of all values since the last reset, over all replicas.

    Every value counts once, so give it one for each example: the losses rather than their mean. A
    single number counts once for each replica; what ``compute_average_loss`` gives is only this
    replica's part of a mean and has to be summed with ``all_reduce`` first. In a partial batch the
    padding is left out; dim 0 of the values is the batch.

    Args:
        argname: the keyword of ``update`` that holds the values.

    Attributes:
        total: the sum of the values, times their sample weights, float32.
        count: how many values had no sample weight, int32: at most 2³¹ - 1 between two resets.
        weight: the sum of the sample weights of those that had one, float32.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Average("loss")
        >>> metric.update(loss=jnp.array([1.0, 2.0, 6.0]))
        >>> float(metric.compute())
        3.0
        >>> metric.update(loss=jnp.array([5.0, 100.0]), mask=jnp.array([True, False]))
        >>> float(metric.compute())
        3.5

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    def __init__(self, argname: str = "values") -> None:
        """Starts with nothing; see the class for the argument."""
        self.argname = argname
        self.total = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))
        self.weight = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))

    @promoting
    def update(self, mask: Any = None, sample_weight: Any = None, **kwargs: Any) -> None:
        """Adds values, inside ``run`` this replica's.

        Args:
            mask: bools, True where a value counts; dims match those of the values from the left.
            sample_weight: how much each value counts; dims match from the left.
            kwargs: the values under ``argname``, of any shape; other keywords are left to others.

        Raises:
            ValueError: no values, a per-replica value outside of ``run``, or shapes that do not match.
        """
        values = taken(self, self.argname, kwargs)
        self._add(self.argname, values, mask, sample_weight)

    def _add(self, name: str, values: Any, mask: Any, sample_weight: Any) -> None:
        new = terms(self, name, values, mask, sample_weight)
        self.total[...] += jnp.sum(new.values * new.weights)
        self.count[...] += new.count
        self.weight[...] += new.weight

    @promoting
    def compute(self) -> jax.Array:
        """Gives the mean, a float32 scalar; NaN where nothing was added."""
        return self.total[...] / (self.count[...] + self.weight[...])
