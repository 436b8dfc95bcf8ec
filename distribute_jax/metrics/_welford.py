"""Mean and standard deviation of values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from distribute_jax._fitting import promoting
from distribute_jax.metrics._metric import Metric
from distribute_jax.metrics._terms import taken, terms
from distribute_jax.program import MergeRule, moments_combined, register_merge


class Welford(Metric):
    """Mean, standard deviation and standard error of all values since the last reset.

    The replicas' means and squared deviations do not add up; they are merged by the rule for two
    parts of one sample, which stays accurate in float32 where the mean is large against the
    deviations.

    Args:
        argname: the keyword of ``update`` that holds the values.

    Attributes:
        count: how many values had no sample weight, int32: at most 2³¹ - 1 between two resets.
        weight: the sum of the sample weights of those that had one, float32.
        mean: the mean, float32.
        m2: the sum of the squared deviations from the mean, float32.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Welford("loss")
        >>> metric.update(loss=jnp.array([1.0, 3.0]))
        >>> metric.update(loss=jnp.array([5.0, 7.0]), mask=jnp.array([True, False]))
        >>> found = metric.compute()
        >>> float(found.mean), round(float(found.standard_deviation), 3)
        (3.0, 1.633)

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    def __init__(self, argname: str = "values") -> None:
        """Starts with nothing; see the class for the argument."""
        self.argname = argname
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))
        self.weight = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))
        self.mean = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))
        self.m2 = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))

    @promoting
    def update(self, mask: Any = None, sample_weight: Any = None, **kwargs: Any) -> None:
        """Adds values, inside ``run`` this replica's.

        Args:
            mask: bools, True where a value counts; dims match those of the values from the left.
            sample_weight: how often each value counts; dims match from the left.
            kwargs: the values under ``argname``, of any shape; other keywords are left to others.

        Raises:
            ValueError: no values, a per-replica value outside of ``run``, or shapes that do not match.
        """
        values = taken(self, self.argname, kwargs)
        new = terms(self, self.argname, values, mask, sample_weight)
        old_size = self.count[...] + self.weight[...]
        self.count[...] += new.count
        self.weight[...] += new.weight
        size, total = new.count + new.weight, self.count[...] + self.weight[...]
        # An empty share adds nothing, and must not divide by nothing.
        mean = jnp.sum(new.values * new.weights) / jnp.where(size > 0, size, 1)
        m2 = jnp.sum(new.weights * (new.values - mean) ** 2)
        share = size / jnp.where(total > 0, total, 1)
        apart = mean - self.mean[...]
        self.mean[...] += apart * share
        self.m2[...] += m2 + apart**2 * old_size * share

    @promoting
    def compute(self) -> Any:
        """Gives ``nnx.metrics.Statistics``; the deviation and the error are NaN without values."""
        size = self.count[...] + self.weight[...]
        deviation = jnp.sqrt(self.m2[...] / size)
        return nnx.metrics.Statistics(
            mean=jnp.copy(self.mean[...]),  # the next step takes the memory of the metric itself
            standard_error_of_mean=deviation / jnp.sqrt(size),
            standard_deviation=deviation,
        )


register_merge(Welford, MergeRule(("count", "weight", "mean", "m2"), moments_combined))
