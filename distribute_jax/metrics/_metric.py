"""The base of all metrics: state that the replicas add to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx

from distribute_jax._instead import answering


class Metric(nnx.metrics.Metric):
    """The base of metrics: ``update`` with each batch, ``compute`` when wanted, ``reset`` to start.

    Inside ``run`` every replica updates with its share of the batch, and what the replicas added is
    summed when the step ends. Outside, the state is that of all replicas. Inside, ``compute`` gives
    the same before an update; after one it holds the old state and this replica's own share only.

    Your own metric keeps its state in ``nnx.metrics.MetricState`` variables, and ``update`` adds to
    them. State that is no sum, as a maximum, goes into a plain ``nnx.Variable``, made equal on every
    replica by the update itself.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> from flax import nnx
        >>> class Positives(dj.metrics.Metric):
        ...     def __init__(self):
        ...         self.total = nnx.metrics.MetricState(jnp.array(0))
        ...     def update(self, *, labels, **_):
        ...         mask = dj.get_replica_context().batch_mask
        ...         self.total[...] += jnp.sum(labels > 0 if mask is None else (labels > 0) & mask)
        ...     def compute(self):
        ...         return self.total[...]
        >>> metric = Positives()
        >>> metric.update(labels=jnp.array([1, 0, 2]))
        >>> int(metric.compute())
        2
        >>> metric.reset()
        >>> int(metric.compute())
        0

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    if not TYPE_CHECKING:
        __getattr__ = answering("Metric")

    def __init__(self) -> None:
        """Makes a metric without state; a subclass adds its own."""

    def reset(self) -> None:
        """Sets every ``MetricState`` of this metric to zero, where it lies."""
        for value in vars(self).values():
            if isinstance(value, nnx.metrics.MetricState):
                value[...] = jnp.zeros_like(value[...])

    def update(self, **kwargs: Any) -> None:
        """Adds what a batch contributes; a subclass defines it.

        Args:
            kwargs: what the metric is made of; keywords that it does not know are left to others.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define update(self, **kwargs)")

    def compute(self) -> Any:
        """Gives the value of the metric; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} has to define compute(self)")
