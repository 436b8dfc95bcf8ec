"""The base class of metrics, and which values of an update count: mask, weights and padding."""

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


def in_snake_case(cls: type) -> str:
    """Returns Keras's default name of the metrics of a class."""
    return _BEFORE_WORD.sub("_", cls.__name__).lower()


class Metric(nnx.metrics.Metric):
    """The base class of metrics: ``update`` with each batch, ``compute`` the value, ``reset`` the state.

    Inside ``run`` every replica updates with its share of the batch, and the additions of all replicas
    are summed when the step ends. Outside, the state is that of all replicas. Inside, before an update,
    ``compute`` returns the value over all replicas; after it, the value of the old state with only this
    replica's share added.

    A metric of your own keeps its state in ``nnx.metrics.MetricState`` variables, and ``update`` adds to
    them. State that is not a sum, such as a maximum, belongs in a plain ``nnx.Variable``, which the update
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

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        """Creates a metric without state, which a subclass adds.

        Args:
            name: the name under which ``fit`` reports it.
            dtype: has no effect.
        """
        self.name = name or in_snake_case(type(self))

    def reset(self) -> None:
        """Sets every ``MetricState`` of this metric to zero, on its devices."""
        for value in vars(self).values():
            if isinstance(value, nnx.metrics.MetricState):
                value[...] = jnp.zeros_like(value[...])

    def update(self, **kwargs: Any) -> None:
        """Adds what a batch contributes; a subclass defines it.

        Args:
            kwargs: what the metric needs; it ignores keywords that it does not know.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define update(self, **kwargs)")

    def compute(self) -> Any:
        """Returns the value of the metric; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} has to define compute(self)")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Calls ``update`` with Keras's arguments, labels first. ``Mean`` and similar metrics take values.

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
        return self.result()


def keywords(y_true: Any, y_pred: Any) -> dict[str, Any]:
    """Returns labels and predictions under every name that an ``update`` takes, Flax's or Keras's."""
    return dict.fromkeys(("logits", "predictions", "y_pred"), y_pred) | dict.fromkeys(
        ("labels", "targets", "y_true"), y_true
    )


def update_with(metric: Any, words: dict[str, Any], **more: Any) -> None:
    """Updates a metric with those of the keywords that it takes, and with all of ``more``."""
    known = inspect.signature(metric.update).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    metric.update(**({k: v for k, v in words.items() if takes_all or k in known} | more))


@dataclass(frozen=True)
class Terms:
    """The values of one update with their weights, in float32."""

    values: jax.Array
    """0 where a value does not count, even if it is NaN."""
    weights: jax.Array
    """Of the values' shape: 0 where a value does not count, else its sample weight or 1."""
    count: jax.Array
    """int32: how many values count; 0 if they have sample weights."""
    weight: jax.Array
    """The sum of the sample weights; 0 without any."""


class OfValues(Metric):
    """A metric of the values under one keyword; a subclass accumulates them."""

    def __init__(self, argname: str = "values") -> None:
        super().__init__()
        self.argname = argname
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))
        self.weight = nnx.metrics.MetricState(jnp.zeros((), jnp.float32))

    @promoting
    def update(self, mask: Any = None, sample_weight: Any = None, **kwargs: Any) -> None:
        """Adds values; inside ``run`` this replica's.

        Args:
            mask: bools, True where a value counts; dims match those of the values from the left.
            sample_weight: how much each value counts; dims match from the left.
            kwargs: the values under ``argname``, of any shape; other keywords are ignored.

        Raises:
            ValueError: no values, a per-replica value outside of ``run``, or shapes that do not match.
        """
        if self.argname not in kwargs:
            raise ArgumentError(
                f"{_method(self)} needs {self.argname}=, and got {sorted(kwargs) or 'nothing'}. A metric "
                "reads the keyword named by its argname: pass it, or create the metric with another argname."
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
        """Adds the values that count; a subclass defines it."""

    def _size(self) -> jax.Array:
        return self.count[...] + self.weight[...]


def terms(metric: object, name: str, values: Any, mask: Any, sample_weight: Any) -> Terms:
    """Returns the values of an update in float32, with the weights that mask and padding leave."""
    if isinstance(values, (np.ndarray, np.generic)) and values.dtype.kind in "iu":
        values = values.astype(np.float32)  # JAX would truncate 64-bit integers to 32 bits
    values = as_array(metric, name, values)
    shape = values.shape
    keep = _counted(metric, name, shape, mask)
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


def _counted(metric: object, name: str, shape: tuple[int, ...], mask: Any) -> jax.Array | None:
    """Returns a mask of the values that count, with as many dims as they have; None if all do."""
    real = real_mask(_method(metric), name, shape, get_replica_context())
    if mask is None:
        return real
    array = as_array(metric, "mask", mask)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(
            f"{_method(metric)} got a mask of dtype {array.dtype}. A mask is True where a value counts: "
            "pass mask > 0; or pass weights as sample_weight=."
        )
    keep = align(_method(metric), "mask", array.astype(bool), name, shape)
    return keep if real is None else keep & real


def _method(metric: object) -> str:
    return f"{type(metric).__name__}.update"
