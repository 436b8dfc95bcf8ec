"""Two levels: inside a group of replicas, and between the groups."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax.collectives._cross_device import CrossDeviceOps, checked_num_packs
from distribute_jax.collectives._dtypes import wide
from distribute_jax.collectives._mirrored import assume_mirrored


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Adds up inside groups of neighbours first, then between the groups: for many hosts.

    Each member of a group adds up its part of the array over the group (reduce-scatter); members of
    the same rank add their parts over the groups (all-reduce); and the group shares the parts
    (all-gather). Between groups only 1 / group size of the array is sent by each replica, over what
    is the slow network where a group is a host.

    bfloat16 and float16 are added up in float32 and rounded once. Each part is added up by one member
    of a group and copied, so all replicas hold the same bits.

    Args:
        num_packs: the number of vectors that the arrays of each dtype are joined and cut into; with 0
            each array is combined by itself.
        group_size: consecutive replicas in a group, a divisor of their number. None means the replicas
            of one process; in a single process, the smallest divisor whose square is not below the
            number of replicas (4 of 8).

    Raises:
        ValueError: ``num_packs`` is no int of 0 or more, or ``group_size`` no int of 1 or more; in
            the step: ``group_size`` does not divide the number of replicas.

    Example:
        >>> import distribute_jax as dj
        >>> ops = dj.HierarchicalCopyAllReduce()
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/HierarchicalCopyAllReduce
    """

    __module__ = "distribute_jax"

    def __init__(self, num_packs: int = 1, *, group_size: int | None = None) -> None:
        self.num_packs = checked_num_packs(num_packs, "HierarchicalCopyAllReduce")
        is_int = isinstance(group_size, int) and not isinstance(group_size, bool)
        if group_size is not None and not (is_int and group_size >= 1):
            raise ArgumentError(
                f"HierarchicalCopyAllReduce(group_size={group_size!r}): group_size must be None or an "
                "int, 1 or more. None makes a group of each process."
            )
        self.group_size = group_size

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        """See the base class."""
        replicas = jax.lax.axis_size(axis_name)
        size = self._size_for(replicas)
        groups = [list(range(start, start + size)) for start in range(0, replicas, size)]
        between = [list(range(rank, replicas, size)) for rank in range(size)]
        padded = jnp.pad(value.ravel(), (0, -value.size % size)).astype(wide(value.dtype))
        part = jax.lax.psum_scatter(padded, axis_name, axis_index_groups=groups, tiled=True)
        part = jax.lax.psum(part, axis_name, axis_index_groups=between).astype(value.dtype)
        whole = jax.lax.all_gather(part, axis_name, axis_index_groups=groups, tiled=True)
        summed: jax.Array = assume_mirrored(whole[: value.size].reshape(value.shape))
        return summed

    def _size_for(self, replicas: int) -> int:
        if self.group_size is None:
            return _natural_size(replicas, jax.process_count())
        if replicas % self.group_size:
            raise ArgumentError(
                f"HierarchicalCopyAllReduce(group_size={self.group_size}) does not divide the "
                f"{replicas} replicas of the strategy, so the groups would be unequal. Choose a "
                "divisor, or None."
            )
        return self.group_size


def _natural_size(replicas: int, processes: int) -> int:
    if processes > 1 and replicas % processes == 0:
        return replicas // processes
    return next(
        size
        for size in range(math.isqrt(replicas), replicas + 1)
        if size * size >= replicas and replicas % size == 0
    )
