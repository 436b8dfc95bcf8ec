"""All-reduce algorithms that users can choose: ring, hierarchical, and reduction to one device."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import leaf_text
from distribute_jax.collectives._cross_device_ops import CrossDeviceOps
from distribute_jax.collectives._dtypes import wide
from distribute_jax.collectives._markers import assume_mirrored


class RingAllReduce(CrossDeviceOps):
    """A ring all-reduce written with ``ppermute``: an example, and a baseline for measurements.

    The array is divided into one chunk for each of the N replicas. In N-1 steps every chunk travels once
    around the ring, and each replica adds its values to it; in N-1 more the sums travel around. Each
    replica sends 2 (N-1) / N of the bytes of the array, less than twice its size for any N.

    bfloat16 and float16 are added in float32 and rounded once. Each chunk is completed on one replica
    and copied to the others, so all replicas have the same bits.

    Args:
        num_packs: the arrays of each dtype are concatenated and divided into this many vectors; with 0
            each array is reduced separately.

    Raises:
        ValueError: ``num_packs`` is not an int of 0 or more.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=dj.RingAllReduce())
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    References:
        Pitch Patarasuk and Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009, https://doi.org/10.1016/j.jpdc.2008.09.002
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = check_int("RingAllReduce(num_packs)", num_packs, 0)

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        """See the base class."""
        replicas = jax.lax.axis_size(axis_name)
        padded = jnp.pad(value.ravel(), (0, -value.size % replicas))
        finished = _reduce_scatter(padded.reshape(replicas, -1), axis_name)
        chunks = _all_gather(finished, axis_name)
        summed: jax.Array = assume_mirrored(chunks.ravel()[: value.size].reshape(value.shape))
        return summed


def _next(axis_name: str) -> list[tuple[int, int]]:
    replicas = jax.lax.axis_size(axis_name)
    return [(i, (i + 1) % replicas) for i in range(replicas)]


def _reduce_scatter(chunks: jax.Array, axis_name: str) -> jax.Array:
    """Returns the sum of chunk ``me + 1``, to which this replica adds last."""
    replicas, me = len(chunks), jax.lax.axis_index(axis_name)
    local = chunks.astype(wide(chunks.dtype))

    def step(i: int, partial_sum: jax.Array) -> jax.Array:
        received: jax.Array = jax.lax.ppermute(partial_sum, axis_name, _next(axis_name))
        return received + local[(me - i - 1) % replicas]

    finished: jax.Array = jax.lax.fori_loop(0, replicas - 1, step, local[me])
    return finished.astype(chunks.dtype)


def _all_gather(finished: jax.Array, axis_name: str) -> jax.Array:
    """Returns all chunks in order, each copied from the replica that completed it."""
    replicas, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    chunks = jnp.zeros((replicas, *finished.shape), finished.dtype)

    def step(i: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunks, chunk = state
        chunk = jax.lax.ppermute(chunk, axis_name, _next(axis_name))
        return chunks.at[(me - i) % replicas].set(chunk), chunk

    start = chunks.at[(me + 1) % replicas].set(finished), finished
    gathered: jax.Array = jax.lax.fori_loop(0, replicas - 1, step, start)[0]
    return gathered


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Adds first within groups of replicas, then between the groups: for many hosts.

    Each member of a group sums its part of the array over the group (reduce-scatter); members of
    equal rank sum their parts over the groups (all-reduce); and the parts are gathered within each
    group (all-gather). Between groups each replica sends only 1 / group size of the array: if a group
    is a host, only this part crosses the slow network.

    bfloat16 and float16 are added in float32 and rounded once. Each part is summed on one member of a
    group and copied to the others, so all replicas have the same bits.

    Args:
        num_packs: the arrays of each dtype are concatenated and divided into this many vectors; with 0
            each array is reduced separately.
        group_size: the number of consecutive replicas in a group, a divisor of the number of replicas.
            None means the replicas of one process; in a single process, the smallest divisor whose
            square is not below the number of replicas (4 of 8).

    Raises:
        ValueError: ``num_packs`` is not an int of 0 or more, or ``group_size`` not an int of 1 or more; in
            the step: ``group_size`` does not divide the number of replicas.

    Example:
        >>> import distribute_jax as dj
        >>> ops = dj.HierarchicalCopyAllReduce()
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/HierarchicalCopyAllReduce
    """

    def __init__(self, num_packs: int = 1, *, group_size: int | None = None) -> None:
        self.num_packs = check_int("HierarchicalCopyAllReduce(num_packs)", num_packs, 0)
        self.group_size = group_size
        if group_size is not None:
            check_int("HierarchicalCopyAllReduce(group_size)", group_size)

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        """See the base class."""
        replicas = jax.lax.axis_size(axis_name)
        size = self._group_size_for(replicas)
        groups = [list(range(start, start + size)) for start in range(0, replicas, size)]
        between = [list(range(rank, replicas, size)) for rank in range(size)]
        padded = jnp.pad(value.ravel(), (0, -value.size % size)).astype(wide(value.dtype))
        part = jax.lax.psum_scatter(padded, axis_name, axis_index_groups=groups, tiled=True)
        part = jax.lax.psum(part, axis_name, axis_index_groups=between).astype(value.dtype)
        gathered = jax.lax.all_gather(part, axis_name, axis_index_groups=groups, tiled=True)
        summed: jax.Array = assume_mirrored(gathered[: value.size].reshape(value.shape))
        return summed

    def _group_size_for(self, replicas: int) -> int:
        if self.group_size is None:
            return _default_group_size(replicas, jax.process_count())
        if replicas % self.group_size:
            raise ArgumentError(
                f"HierarchicalCopyAllReduce(group_size={self.group_size}) does not divide the "
                f"{replicas} replicas of the strategy, so the groups would be unequal. Choose a "
                "divisor, or None."
            )
        return self.group_size


def _default_group_size(replicas: int, processes: int) -> int:
    if processes > 1 and replicas % processes == 0:
        return replicas // processes
    return next(
        size
        for size in range(math.isqrt(replicas), replicas + 1)
        if size * size >= replicas and replicas % size == 0
    )


Accumulate = Callable[[Sequence[jax.Array]], jax.Array]


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one replica, adds them there in replica order, and copies the sum back.

    The order of additions is the same on every platform, at the cost of N times the memory and
    traffic on one device. bfloat16 and float16 are added in float32 and rounded once.

    Args:
        reduce_to_device: a device of the strategy, as ``MirroredStrategy`` takes them; None means
            that of replica 0.
        accumulation_fn: called with a list of the replicas' arrays, in replica order; returns their
            sum, of the same shape and dtype. None means addition in that order.

    Raises:
        ValueError: ``accumulation_fn`` cannot be called; in the strategy: it does not have the
            device; in the step: ``accumulation_fn`` did not return an array of that shape and dtype.

    Example:
        >>> import distribute_jax as dj
        >>> ops = dj.ReductionToOneDevice("cpu:1")
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReductionToOneDevice
    """

    def __init__(
        self, reduce_to_device: Any = None, accumulation_fn: Accumulate | None = None
    ) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._root = 0

    def on_replica(self, replica: int) -> ReductionToOneDevice:
        """Returns a copy that adds on a replica; called by the strategy.

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
        # Except on the root the copies are zeros, and the total is replaced below.
        total = self._sum([copied.get(i, value) for i in range(replicas)])
        result = total
        for i in others:
            received = jax.lax.ppermute(total, axis_name, [(self._root, i)])
            result = jnp.where(me == i, received, result)
        summed: jax.Array = assume_mirrored(result)
        return summed

    def _sum(self, values: list[jax.Array]) -> jax.Array:
        dtype = values[0].dtype
        if self.accumulation_fn is None:
            return functools.reduce(jnp.add, [v.astype(wide(dtype)) for v in values]).astype(dtype)
        total = self.accumulation_fn(values)
        aval = jax.typeof(values[0])
        if not isinstance(total, jax.Array) or (total.shape, total.dtype) != (aval.shape, dtype):
            raise ArgumentError(
                f"ReductionToOneDevice(accumulation_fn=...) returned {leaf_text(total)} for "
                f"{len(values)} values {leaf_text(values[0])}. It must return one array of the same "
                "shape and dtype, their sum."
            )
        return total

    def __repr__(self) -> str:
        return f"ReductionToOneDevice(reduce_to_device={self.reduce_to_device!r})"
