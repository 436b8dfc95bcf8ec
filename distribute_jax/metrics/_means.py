"""The metrics of ``flax.nnx.metrics``: averages, accuracy, standard deviations, and groups of metrics."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import promoting
from distribute_jax.metrics._metric import Metric, OfValues, as_array, terms
from distribute_jax.program import MergeRule, combine_moments, register_merge


class Average(OfValues):
    """The mean of all values since the last reset, over all replicas.

    Every value counts once, so pass one for each example: the losses rather than their mean. A
    single number counts once for each replica; the result of ``compute_average_loss`` is only this
    replica's part of a mean and must be summed with ``all_reduce`` first. The padding of a partial
    batch does not count; dim 0 of the values is the batch.

    Args:
        argname: the keyword of ``update`` for the values.

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
        super().__init__(argname)
        self.total = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))

    def _add(self, name: str, values: Any, mask: Any, sample_weight: Any) -> None:
        new = terms(self, name, values, mask, sample_weight)
        self.total[...] += jnp.sum(new.values * new.weights)
        self.count[...] += new.count
        self.weight[...] += new.weight

    @promoting
    def compute(self) -> jax.Array:
        """Returns the mean, a float32 scalar; NaN without values."""
        return self.total[...] / self._size()


class Accuracy(Average):
    """The share of examples that were classified correctly, since the last reset, over all replicas.

    Args:
        threshold: None for several classes, of which the one with the largest logit is predicted. A
            number for two classes: a logit that reaches it predicts a positive label.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Accuracy()
        >>> metric.update(logits=jnp.array([[2.0, 1.0], [0.0, 3.0]]), labels=jnp.array([0, 0]))
        >>> float(metric.compute())
        0.5

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    update_state = Metric.update_state  # type: ignore[assignment]  # two arguments again

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__("values")
        self.threshold = threshold

    def update(  # type: ignore[override]  # the values are computed from two arguments
        self, *, logits: Any, labels: Any, mask: Any = None, sample_weight: Any = None, **_: Any
    ) -> None:
        """Adds predictions, inside ``run`` this replica's.

        Args:
            logits: shape (batch, ..., classes); with a threshold that of the labels.
            labels: the true classes, integers or bools, shape (batch, ...).
            mask: bools, True where an example counts; dims match those of the labels from the left.
            sample_weight: how much each example counts; dims match from the left.
            _: keywords for other metrics.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        logits = as_array(self, "logits", logits)
        labels = as_array(self, "labels", labels)
        self._check(logits, labels)
        if self.threshold is not None:
            correct = (logits >= self.threshold) == (labels > 0)
        else:
            correct = jnp.argmax(logits, axis=-1) == labels
        self._add("labels", correct, mask, sample_weight)

    def _check(self, logits: jax.Array, labels: jax.Array) -> None:
        class_dims = 0 if self.threshold is not None else 1
        if logits.shape[: logits.ndim - class_dims] != labels.shape or logits.ndim < class_dims:
            expected = "the shape of the labels" if not class_dims else "one more dim, the classes"
            raise ArgumentError(
                f"Accuracy.update got logits of shape {logits.shape} for labels of shape "
                f"{labels.shape}. With threshold={self.threshold} the logits have {expected}; labels are "
                "class numbers, not one-hot: pass jnp.argmax(labels, axis=-1)."
            )


class Welford(OfValues):
    """Mean, standard deviation and standard error of all values since the last reset.

    The replicas' means and squared deviations are not additive; they are merged by the formula for two
    parts of one sample, which stays accurate in float32 even if the mean is much larger than the
    deviations.

    Args:
        argname: the keyword of ``update`` for the values.

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
        >>> statistics = metric.compute()
        >>> float(statistics.mean), round(float(statistics.standard_deviation), 3)
        (3.0, 1.633)

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    def __init__(self, argname: str = "values") -> None:
        super().__init__(argname)
        self.mean = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))
        self.m2 = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))

    def _add(self, name: str, values: Any, mask: Any, sample_weight: Any) -> None:
        new = terms(self, name, values, mask, sample_weight)
        old_size = self._size()
        self.count[...] += new.count
        self.weight[...] += new.weight
        size, total = new.count + new.weight, self._size()
        # A share without values must not divide by 0.
        mean = jnp.sum(new.values * new.weights) / jnp.where(size > 0, size, 1)
        m2 = jnp.sum(new.weights * (new.values - mean) ** 2)
        share = size / jnp.where(total > 0, total, 1)
        delta = mean - self.mean[...]
        self.mean[...] += delta * share
        self.m2[...] += m2 + delta**2 * old_size * share

    @promoting
    def compute(self) -> Any:
        """Returns ``nnx.metrics.Statistics``; the deviation and the error are NaN without values."""
        size = self._size()
        deviation = jnp.sqrt(self.m2[...] / size)
        return nnx.metrics.Statistics(
            mean=jnp.copy(self.mean[...]),  # the metric's array will be donated to the next step
            standard_error_of_mean=deviation / jnp.sqrt(size),
            standard_deviation=deviation,
        )


register_merge(Welford, MergeRule(("count", "weight", "mean", "m2"), combine_moments))


class MultiMetric(Metric):
    """Several named metrics that are updated, computed and reset together.

    Args:
        metrics: the metrics by name: of this package, of ``flax.nnx.metrics``, or your own.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metrics = dj.metrics.MultiMetric(
        ...     accuracy=dj.metrics.Accuracy(), loss=dj.metrics.Average("loss")
        ... )
        >>> metrics.update(
        ...     logits=jnp.array([[2.0, 1.0]]), labels=jnp.array([0]), loss=jnp.array([0.5])
        ... )
        >>> {name: float(value) for name, value in metrics.compute().items()}
        {'accuracy': 1.0, 'loss': 0.5}

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    def __init__(self, **metrics: nnx.metrics.Metric) -> None:
        self.names = tuple(metrics)
        for name, metric in metrics.items():
            if not isinstance(metric, nnx.metrics.Metric):
                raise ArgumentError(
                    f"MultiMetric got {name}={metric!r:.60}, which is not a metric. Pass an instance, as "
                    f"{name}=dj.metrics.Average('{name}')."
                )
            setattr(self, name, metric)

    def reset(self) -> None:
        for name in self.names:
            getattr(self, name).reset()

    def update(self, mask: Any = None, sample_weight: Any = None, **kwargs: Any) -> None:
        """Updates every metric with the same keywords, of which each uses those that it knows.

        Args:
            mask: for all metrics, or a dict of masks by the names of metrics.
            sample_weight: for all metrics, or a dict of weights by the names of metrics.
            kwargs: what the metrics need.

        Raises:
            ValueError: a metric has no such keyword, or cannot take a mask or weights.
        """
        for name in self.names:
            metric = getattr(self, name)
            more = {"mask": self._for(name, mask), "sample_weight": self._for(name, sample_weight)}
            more = {key: value for key, value in more.items() if value is not None}
            _check_takes(name, metric, more)
            metric.update(**kwargs, **more)

    def _for(self, name: str, value: Any) -> Any:
        """Returns the mask or the weights for one metric."""
        if not isinstance(value, dict):
            return value
        unknown = sorted(set(value) - set(self.names))
        if unknown:
            raise ArgumentError(
                f"MultiMetric.update got a mask or weights for {', '.join(unknown)}. It has the "
                f"metrics {', '.join(self.names)}."
            )
        return value.get(name)

    def compute(self) -> dict[str, Any]:
        """Returns the value of every metric by name."""
        return {name: getattr(self, name).compute() for name in self.names}


def _check_takes(name: str, metric: Any, arguments: dict[str, Any]) -> None:
    """Raises if a metric would ignore a mask or weights, as unknown keywords are ignored."""
    known = inspect.signature(metric.update).parameters
    # A MultiMetric of Flax passes all keywords on.
    ignored = [key for key in arguments if key not in known]
    if ignored and not isinstance(metric, nnx.MultiMetric):
        raise ArgumentError(
            f"MultiMetric.update got {' and '.join(ignored)}, which {name} ({type(metric).__name__}) does "
            "not take. Use the metric of dj.metrics, or pass a dict by the names of those that do."
        )
