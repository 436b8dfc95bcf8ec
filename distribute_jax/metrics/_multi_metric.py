"""Several metrics under names, updated in one call."""

from __future__ import annotations

import inspect
from typing import Any

from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax.metrics._metric import Metric

_RESERVED = frozenset({"compute", "reset", "split", "update"})


class MultiMetric(Metric):
    """Several metrics, each under a name, which are updated, computed and reset together.

    Args:
        metrics: the metrics by name, of this package, of ``flax.nnx.metrics`` or your own.

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
        """Takes the metrics; see the class."""
        bad = sorted(_RESERVED & set(metrics))
        if bad:
            raise ArgumentError(
                f"MultiMetric got metrics named {', '.join(bad)}, which are its own methods. Give "
                "them other names."
            )
        self.names = tuple(metrics)
        for name, metric in metrics.items():
            if not isinstance(metric, nnx.metrics.Metric):
                raise ArgumentError(
                    f"MultiMetric got {name}={metric!r:.60}, which is no metric. Pass an instance, as "
                    f"{name}=dj.metrics.Average('{name}')."
                )
            setattr(self, name, metric)

    def reset(self) -> None:
        """Resets every metric."""
        for name in self.names:
            getattr(self, name).reset()

    def update(self, mask: Any = None, sample_weight: Any = None, **kwargs: Any) -> None:
        """Updates every metric with the same keywords, of which each takes what it knows.

        Args:
            mask: for all metrics, or a dict with the mask of some by name.
            sample_weight: for all metrics, or a dict with the weights of some by name.
            kwargs: what the metrics are made of.

        Raises:
            ValueError: a metric has no such keyword, or cannot take a mask or weights.
        """
        for name in self.names:
            metric = getattr(self, name)
            more = {"mask": self._for(name, mask), "sample_weight": self._for(name, sample_weight)}
            given = {key: value for key, value in more.items() if value is not None}
            _check_takes(name, metric, given)
            metric.update(**kwargs, **given)

    def _for(self, name: str, value: Any) -> Any:
        """Gives the part of a mask or of weights that is meant for one metric."""
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
        """Gives the value of every metric by name."""
        return {name: getattr(self, name).compute() for name in self.names}


def _check_takes(name: str, metric: Any, given: dict[str, Any]) -> None:
    """Refuses a mask or weights that a metric would leave unread among its other keywords."""
    known = inspect.signature(metric.update).parameters
    # A MultiMetric of Flax hands everything on.
    ignored = [key for key in given if key not in known]
    if ignored and not isinstance(metric, nnx.MultiMetric):
        raise ArgumentError(
            f"MultiMetric.update got {' and '.join(ignored)}, which {name} "
            f"({type(metric).__name__}) does not take. Use the metric of dj.metrics, or pass a dict "
            "by the names of those that do."
        )
