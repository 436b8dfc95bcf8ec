"""The base of all metrics, and which values of an update count: mask, weights and padding."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._absent import getattr_with_hints
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import promoting, real_array
from distribute_jax._padding import align, real_mask
from distribute_jax.strategies import get_replica_context

_BEFORE_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def in_snake_case(metric: Any) -> str:
    """Returns the name that Keras has for a metric without one: that of its class."""
    return _BEFORE_WORD.sub("_", type(metric).__name__).lower()


class Metric(nnx.metrics.Metric):
    """The base of metrics: ``update`` with each batch, ``compute`` the value, ``reset`` to start again.

    Inside ``run`` every replica updates with its share of the batch, and what the replicas added is
    summed when the step ends. Outside, the state is that of all replicas. Inside, ``compute`` returns
    the value over all replicas before an update, and afterwards that of the old state with this replica's
    share only.

    A metric of your own keeps its state in ``nnx.metrics.MetricState`` variables, and ``update`` adds to
    them. State that is not a sum, such as a maximum, goes into a plain ``nnx.Variable``, which the update
    itself must make equal on every replica.

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
        __getattr__ = getattr_with_hints("dj.metrics.Metric")

    def __init__(self) -> None:
        """Makes a metric without state, which a subclass adds."""

    def reset(self) -> None:
        """Sets every ``MetricState`` of this metric to zero, where it is."""
        for value in vars(self).values():
            if isinstance(value, nnx.metrics.MetricState):
                value[...] = jnp.zeros_like(value[...])

    def update(self, **kwargs: Any) -> None:
        """Adds what a batch contributes; a subclass defines it.

        Args:
            kwargs: what the metric is made of; keywords that it does not know are left to others.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define update(self, **kwargs), which update_state calls"
        )

    def compute(self) -> Any:
        """Returns the value of the metric; a subclass defines it."""
        raise NotImplementedError(
            f"{type(self).__name__} has to define compute(self), which result calls"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Calls ``update`` with Keras's arguments: labels come first. ``Mean`` and others take values.

        Args:
            y_true: labels.
            y_pred: predictions.
            sample_weight: how much each example counts.
        """
        more = {} if sample_weight is None else {"sample_weight": sample_weight}
        update_with(self, keywords(y_true, y_pred), **more)

    def result(self) -> Any:
        """Calls ``compute``: Keras's name."""
        return self.compute()

    def reset_state(self) -> None:
        """Calls ``reset``: Keras's name."""
        self.reset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``update_state``, and returns the value, as in Keras."""
        self.update_state(*args, **kwargs)
        return self.compute()


def keywords(y_true: Any, y_pred: Any) -> dict[str, Any]:
    """Returns labels and predictions under every name that an ``update`` takes, Flax's or Keras's."""
    return dict.fromkeys(("logits", "predictions", "y_pred"), y_pred) | dict.fromkeys(
        ("labels", "targets", "y_true"), y_true
    )


def update_with(metric: Any, words: dict[str, Any], **more: Any) -> None:
    """Updates a metric with those of some keywords that it takes, and with others."""
    known = inspect.signature(metric.update).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    chosen = {k: v for k, v in words.items() if takes_all or k in known} | more
    metric.update(**chosen)


@dataclass(frozen=True)
class Terms:
    """The values of one update with their weights, in float32."""

    values: jax.Array
    """0 where a value does not count, so that its NaN does not either."""
    weights: jax.Array
    """Of the values' shape: 0 where a value does not count, else its sample weight or 1."""
    count: jax.Array
    """int32: how many values count; 0 where they have sample weights."""
    weight: jax.Array
    """The sum of the sample weights; 0 where there are none."""


class OfValues(Metric):
    """A metric of the values under one keyword; a subclass adds them up."""

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))
        self.weight = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))

    @promoting
    def update(self, mask: Any = None, sample_weight: Any = None, **kwargs: Any) -> None:
        """Adds values; inside ``run`` this replica's.

        Args:
            mask: bools, True where a value counts; dims match those of the values from the left.
            sample_weight: how much each value counts; dims match from the left.
            kwargs: the values under ``argname``, of any shape; other keywords are left to other metrics.

        Raises:
            ValueError: no values, a per-replica value outside of ``run``, or shapes that do not match.
        """
        if self.argname not in kwargs:
            raise ArgumentError(
                f"{_method(self)} needs {self.argname}=, and got {sorted(kwargs) or 'nothing'}. A metric "
                "reads the keyword that its argname names: pass it, or make the metric with another argname."
            )
        self._add(self.argname, kwargs[self.argname], mask, sample_weight)

    def update_state(  # type: ignore[override]  # of one argument, as in Keras
        self, values: Any, sample_weight: Any = None
    ) -> None:
        """Calls ``update`` as Keras does.

        Args:
            values: the values, of any shape.
            sample_weight: how much each value counts; dims match from the left.
        """
        self.update(sample_weight=sample_weight, **{self.argname: values})

    def _add(self, name: str, values: Any, mask: Any, sample_weight: Any) -> None:
        """Adds what counts of the values; a subclass defines it."""

    def _size(self) -> jax.Array:
        return self.count[...] + self.weight[...]


def terms(metric: object, name: str, values: Any, mask: Any, sample_weight: Any) -> Terms:
    """Decides which values count, and how much."""
    if isinstance(values, (np.ndarray, np.generic)) and values.dtype.kind in "iu":
        values = values.astype(np.float32)  # JAX would cut 64-bit integers to 32 bits
    values = as_array(metric, name, values)
    shape = values.shape
    keep = _kept(metric, name, shape, mask)
    values = values.astype(jnp.float32)
    weights = jnp.ones(shape, jnp.float32)
    if sample_weight is not None:
        array = as_array(metric, "sample_weight", sample_weight).astype(jnp.float32)
        array = align(_method(metric), "sample_weight", array, name, shape)
        weights = jnp.broadcast_to(array, shape)
    count = jnp.asarray(values.size, jnp.int32)
    if keep is not None:
        values, weights = jnp.where(keep, values, 0), jnp.where(keep, weights, 0)
        count = jnp.broadcast_to(keep, shape).sum(dtype=jnp.int32)
    if sample_weight is None:
        return Terms(values, weights, count, jnp.zeros((), jnp.float32))
    return Terms(values, weights, jnp.zeros((), jnp.int32), weights.sum())


def as_array(metric: object, name: str, value: Any) -> jax.Array:
    """Returns an argument of ``update`` as an array of real numbers."""
    return real_array(_method(metric), name, value)


def _kept(metric: object, name: str, shape: tuple[int, ...], mask: Any) -> jax.Array | None:
    """Returns where values count, with as many dims as they have; None where all do."""
    real = real_mask(_method(metric), name, shape, get_replica_context())
    if mask is None:
        return real
    array = as_array(metric, "mask", mask)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(
            f"{_method(metric)} got a mask of dtype {array.dtype}. A mask is True where a value counts: "
            "pass mask > 0; or pass how much it counts as sample_weight=."
        )
    keep = align(_method(metric), "mask", array.astype(bool), name, shape)
    return keep if real is None else keep & real


def _method(metric: object) -> str:
    return f"{type(metric).__name__}.update"
