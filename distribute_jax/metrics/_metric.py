"""The base of all metrics, and which values of an update count: mask, weights and padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, PerReplicaError
from distribute_jax._lazy import answering
from distribute_jax._messages import leaf_text
from distribute_jax._values import DistributedValues
from distribute_jax.strategies import get_replica_context


class Metric(nnx.metrics.Metric):
    """The base of metrics: ``update`` with each batch, ``compute`` when wanted, ``reset`` to start.

    Inside ``run`` every replica updates with its share of the batch, and what the replicas added is
    summed when the step ends. Outside, the state is that of all replicas. Inside, ``compute`` gives
    the same before an update; after one it holds the old state and this replica's own share only.

    Your own metric keeps its state in ``nnx.metrics.MetricState`` variables, and ``update`` adds to
    them. State that is not a sum, as a maximum, goes into a plain ``nnx.Variable``, made equal on every
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
        """Sets every ``MetricState`` of this metric to zero, where it is."""
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
        """Returns the value of the metric; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} has to define compute(self)")


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


def taken(metric: object, name: str, kwargs: Mapping[str, Any]) -> Any:
    """Returns the argument that a metric is made of."""
    if name not in kwargs:
        raise ArgumentError(
            f"{_method(metric)} needs {name}=, and got {sorted(kwargs) or 'nothing'}. A metric reads "
            "the keyword that its argname names: pass it, or make the metric with another argname."
        )
    return kwargs[name]


def terms(metric: object, name: str, values: Any, mask: Any, sample_weight: Any) -> Terms:
    """Sorts out what counts."""
    if isinstance(values, (np.ndarray, np.generic)) and values.dtype.kind in "iu":
        values = values.astype(np.float32)  # JAX would cut 64-bit integers to 32 bits
    values = as_array(metric, name, values)
    check_real(metric, name, values)
    keep = _kept(metric, name, values.shape, mask)
    values = values.astype(jnp.float32)
    if keep is not None:
        values = jnp.where(keep, values, 0)
    ones = jnp.ones(values.shape, jnp.float32) if keep is None else keep.astype(jnp.float32)
    nothing = jnp.zeros((), jnp.float32)
    if sample_weight is None:
        count = values.size if keep is None else keep.sum(dtype=jnp.int32)
        return Terms(values, ones, jnp.asarray(count, jnp.int32), nothing)
    given = as_array(metric, "sample_weight", sample_weight)
    check_real(metric, "sample_weight", given)
    weights = _aligned(metric, name, "sample_weight", given, values.shape).astype(jnp.float32)
    if keep is not None:
        weights = jnp.where(keep, weights, 0)
    return Terms(values, weights, jnp.zeros((), jnp.int32), weights.sum())


def as_array(metric: object, name: str, value: Any) -> jax.Array:
    """Makes an array of an argument of ``update``."""
    if isinstance(value, DistributedValues):
        raise PerReplicaError(
            f"{_method(metric)} got {name}={value!r} outside of run, one value for each replica. "
            "Update the metric inside the function given to strategy.run, or pass "
            "strategy.gather(value, axis=0)."
        )
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{_method(metric)} got {name}={leaf_text(value)}, which is not an array of numbers. Pass one "
            "number for each example."
        ) from error


def check_real(metric: object, name: str, array: jax.Array) -> None:
    """Refuses what is not a real number."""
    kinds = (jnp.floating, jnp.integer, np.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ArgumentError(
            f"{_method(metric)} got {name} of dtype {array.dtype}. It takes real numbers and bools: "
            "pass jnp.abs(value), or the part that you mean."
        )


def _kept(metric: object, name: str, shape: tuple[int, ...], mask: Any) -> jax.Array | None:
    """Returns where values count, of their shape; None where all do."""
    padding = _real_rows(metric, name, shape)
    if mask is None:
        return padding
    given = as_array(metric, "mask", mask)
    if jnp.issubdtype(given.dtype, jnp.inexact):
        raise ArgumentError(
            f"{_method(metric)} got a mask of dtype {given.dtype}. A mask says whether a value counts: "
            "pass mask > 0; or pass how much it counts as sample_weight=."
        )
    keep = _aligned(metric, name, "mask", given.astype(bool), shape)
    return keep if padding is None else keep & padding


def _real_rows(metric: object, name: str, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask of a partial batch, spread over the values; None for one number, or no padding."""
    context = get_replica_context()
    if context is None or not context.is_padded or not shape:
        return None
    mask = context.batch_mask
    if shape[0] != mask.shape[0]:
        raise ArgumentError(
            f"{_method(metric)} got {name} with {shape[0]} rows for a replica's share of "
            f"{mask.shape[0]} examples, so it cannot tell which belong to the padding of this partial "
            "batch. Give it a row for each example: keep the batch as dim 0 and do not flatten it."
        )
    return _aligned(metric, name, "mask", mask, shape)


def _aligned(
    metric: object, name: str, what: str, array: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Spreads a mask or weights over the values; dims match from the left, as the batch does."""
    fits = all(n in (1, size) for n, size in zip(array.shape, shape, strict=False))
    if array.ndim > len(shape) or not fits:
        raise ArgumentError(
            f"{_method(metric)} got {what} of shape {array.shape} for {name} of shape {shape}. Its "
            "dims are matched with those of the values from the left: pass one number for each "
            "example, shape (batch,), or one for each value."
        )
    more = (1,) * (len(shape) - array.ndim)
    return jnp.broadcast_to(array.reshape(array.shape + more), shape)


def _method(metric: object) -> str:
    return f"{type(metric).__name__}.update"
