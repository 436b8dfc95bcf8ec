"""Everything to one device, which adds up and sends the sum back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import leaf_text
from distribute_jax.collectives._cross_device import CrossDeviceOps
from distribute_jax.collectives._dtypes import wide
from distribute_jax.collectives._mirrored import assume_mirrored

Accumulate = Callable[[Sequence[jax.Array]], jax.Array]


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one replica, adds them there in replica order, and copies the sum back.

    The order of additions is the plainest one, whatever the platform, at the price of N times the
    memory and traffic on one device. bfloat16 and float16 are added up in float32 and rounded once.

    Args:
        reduce_to_device: a device of the strategy, as ``MirroredStrategy`` takes them; None means
            that of replica 0.
        accumulation_fn: called with the list of the replicas' arrays, in replica order; gives their
            sum, of the same shape and dtype. None means to add them up.

    Raises:
        ValueError: ``accumulation_fn`` cannot be called; in the strategy: it does not have the
            device; in the step: ``accumulation_fn`` returned something else than a sum.

    Example:
        >>> import distribute_jax as dj
        >>> ops = dj.ReductionToOneDevice("cpu:1")
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReductionToOneDevice
    """

    __module__ = "distribute_jax"

    def __init__(
        self, reduce_to_device: Any = None, accumulation_fn: Accumulate | None = None
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise ArgumentError(
                f"ReductionToOneDevice(accumulation_fn={accumulation_fn!r}): accumulation_fn must be "
                "None or a function of a list of arrays, such as lambda values: sum(values)."
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._root = 0

    def on_replica(self, replica: int) -> ReductionToOneDevice:
        """Gives the same operation with the replica that adds up; the strategy calls this.

        Args:
            replica: the replica whose device ``reduce_to_device`` names.

        Returns:
            A copy.
        """
        placed = copy.copy(self)
        placed._root = replica
        return placed

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        """See the base class."""
        me, replicas = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
        others = [i for i in range(replicas) if i != self._root]
        copied = {i: jax.lax.ppermute(value, axis_name, [(i, self._root)]) for i in others}
        # On all but one replica the copies are zeros, and the total is replaced below.
        total = self._added([copied.get(i, value) for i in range(replicas)])
        result = total
        for i in others:
            received = jax.lax.ppermute(total, axis_name, [(self._root, i)])
            result = jnp.where(me == i, received, result)
        summed: jax.Array = assume_mirrored(result)
        return summed

    def _added(self, values: list[jax.Array]) -> jax.Array:
        dtype = values[0].dtype
        if self.accumulation_fn is None:
            return functools.reduce(jnp.add, [v.astype(wide(dtype)) for v in values]).astype(dtype)
        total = self.accumulation_fn(values)
        if not isinstance(total, jax.Array) or (total.shape, total.dtype) != (
            values[0].shape,
            dtype,
        ):
            raise ArgumentError(
                f"ReductionToOneDevice(accumulation_fn=...) returned {leaf_text(total)} for "
                f"{len(values)} values {leaf_text(values[0])}. It must return one array of the same "
                "shape and dtype, their sum."
            )
        return total

    def __repr__(self) -> str:
        """Names the device."""
        return f"ReductionToOneDevice(reduce_to_device={self.reduce_to_device!r})"
