"""The implementations of an all-reduce: ``CrossDeviceOps`` as in TensorFlow, and the algorithms."""

from __future__ import annotations

import abc
import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distribute_jax._checks import check_int, check_optional
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax._messages import leaf_text
from distribute_jax.collectives._markers import assume_mirrored
from distribute_jax.collectives._reduction import wide


class CrossDeviceOps(abc.ABC):
    """How arrays are added over the replicas; subclass it to write your own.

    A subclass defines the sum of one array. The library converts dtypes, packs small arrays, divides
    for a mean, and differentiates: the gradient is the same operation on the upstream gradients, as in
    TensorFlow.

    A step may change state with the result only if it is proved equal on every replica. A result of
    ``jax.lax.psum`` or ``jax.lax.all_gather`` over the complete axis is; declare any other with
    ``dj.assume_mirrored``, and make sure that it is bitwise equal: sum each element on one replica and
    copy the sum to the others.

    Attributes:
        num_packs: the arrays of each dtype are concatenated and divided into this many vectors; with 0
            each array is passed as it is.

    Example:
        >>> import distribute_jax as dj, jax
        >>> class GatherAndAdd(dj.CrossDeviceOps):
        ...     def all_reduce_sum(self, value, axis_name):
        ...         return jax.lax.all_gather(value, axis_name).sum(0)
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=GatherAndAdd())
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/CrossDeviceOps
    """

    num_packs: int = 0
    """Vectors into which the arrays of each dtype are packed; 0 for no packing."""

    @abc.abstractmethod
    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        """Sums an array over the replicas, element by element; every replica gets the sum.

        It is traced inside the step, and may use any of JAX's collectives.

        Args:
            value: this replica's array, of any shape; a vector where arrays are packed.
            axis_name: the mesh axis of the replicas; ``jax.lax.axis_size`` returns their number.

        Returns:
            The sum, of the shape and dtype of ``value``.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


sum_p: Any = Primitive("cross_device_sum")
"""The sum of one array over the replicas by a ``CrossDeviceOps``, whose trace is the parameter ``jaxpr``.

It is its own transpose. JAX would transpose the individual sends and receives instead, which adds in
another order, and whose result is not provably mirrored. ``jax.custom_vjp`` does not support forward
mode, and ``jax.custom_derivatives.linear_call`` does not support vmap.
"""


def sum_by(ops: CrossDeviceOps, value: jax.Array) -> jax.Array:
    """Sums an array over the replicas by an operation, differentiably."""
    if not value.size:
        return assume_mirrored(value)
    return _bind(type(ops).__name__, lambda x: ops.all_reduce_sum(x, DATA), value)


def _bind(name: str, function: Callable[[Any], Any], value: Any) -> jax.Array:
    jaxpr = jax.make_jaxpr(function)(value)
    _check_result(name, jaxpr, value)
    return sum_p.bind(value, jaxpr=jaxpr, function=function, name=name)


def _check_result(name: str, jaxpr: Any, value: Any) -> None:
    outs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
    if [(out.shape, out.dtype) for out in outs] != [(value.shape, value.dtype)]:
        raise ArgumentError(
            f"{name}.all_reduce_sum returned {', '.join(map(leaf_text, outs)) or 'nothing'} for "
            f"{leaf_text(value)}. A sum over the replicas has the shape and dtype of one replica's value: "
            "return one array, and convert it with .astype(value.dtype)."
        )
    if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
        raise ArgumentError(
            f"{name}.all_reduce_sum uses a traced value from outside of it. It may use only its "
            "arguments: compute other values, such as jax.lax.axis_index(axis_name), inside."
        )


def _run(value: Any, *, jaxpr: Any, **_: Any) -> Any:
    (summed,) = jex_core.jaxpr_as_fun(jaxpr)(value)
    return summed


def _jvp(values: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return sum_p.bind(*values, **params), sum_p.bind(*tangents, **params)


def _transpose(cotangent: Any, value: Any, **params: Any) -> list[Any]:
    return [cotangent if type(cotangent) is ad.Zero else sum_p.bind(cotangent, **params)]


def _batch(values: Any, dims: Any, *, function: Any, name: str, **_: Any) -> tuple[Any, Any]:
    (value,), (dim,) = values, dims
    return _bind(name, jax.vmap(function, in_axes=dim, out_axes=dim), value), dim


sum_p.def_impl(_run)
sum_p.def_abstract_eval(lambda value, *, jaxpr, **_: jaxpr.out_avals[0])
mlir.register_lowering(sum_p, mlir.lower_fun(_run, multiple_results=False))
batching.primitive_batchers[sum_p] = _batch
ad.primitive_jvps[sum_p] = _jvp
ad.primitive_transposes[sum_p] = _transpose


class NcclAllReduce(CrossDeviceOps):
    """XLA's all-reduce on every platform: NCCL on NVIDIA GPUs.

    It is the default of strategies, and the fastest.

    Args:
        num_packs: with 0 and 1, XLA combines the arrays itself, without copying them. With more, the
            arrays of each dtype are concatenated and divided into that many vectors of about one length,
            the last of which takes the remainder; XLA may combine them again.

    Raises:
        ValueError: ``num_packs`` is not an int of 0 or more.

    Example:
        >>> import distribute_jax as dj
        >>> dj.MirroredStrategy(["cpu:0"], cross_device_ops=dj.NcclAllReduce()).num_replicas_in_sync
        1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/NcclAllReduce
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = check_int("NcclAllReduce(num_packs)", num_packs, 0)

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return jax.lax.psum(value, axis_name)


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
        replicas = jax.lax.axis_size(axis_name)
        padded = jnp.pad(value.ravel(), (0, -value.size % replicas))
        chunks = _all_gather(_reduce_scatter(padded.reshape(replicas, -1), axis_name), axis_name)
        return assume_mirrored(chunks.ravel()[: value.size].reshape(value.shape))


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
    return jax.lax.fori_loop(0, replicas - 1, step, start)[0]


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
        check_optional(check_int, "HierarchicalCopyAllReduce(group_size)", group_size)

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        replicas = jax.lax.axis_size(axis_name)
        size = self._group_size_for(replicas)
        groups = [list(range(start, start + size)) for start in range(0, replicas, size)]
        between = [list(range(rank, replicas, size)) for rank in range(size)]
        padded = jnp.pad(value.ravel(), (0, -value.size % size)).astype(wide(value.dtype))
        part = jax.lax.psum_scatter(padded, axis_name, axis_index_groups=groups, tiled=True)
        part = jax.lax.psum(part, axis_name, axis_index_groups=between).astype(value.dtype)
        gathered = jax.lax.all_gather(part, axis_name, axis_index_groups=groups, tiled=True)
        return assume_mirrored(gathered[: value.size].reshape(value.shape))

    def _group_size_for(self, replicas: int) -> int:
        if self.group_size is None:
            return _default_group_size(replicas, jax.process_count())
        if replicas % self.group_size:
            raise ArgumentError(
                f"HierarchicalCopyAllReduce(group_size={self.group_size}) does not divide the {replicas} "
                "replicas of the strategy, so the groups would be unequal. Choose a divisor, or None."
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
        """Returns a copy that adds on the replica whose device is named; called by the strategy."""
        placed = copy.copy(self)
        placed._root = replica
        return placed

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        me, replicas = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
        others = [i for i in range(replicas) if i != self._root]
        copied = {i: jax.lax.ppermute(value, axis_name, [(i, self._root)]) for i in others}
        # Except on the root the copies are zeros, and the total is replaced below.
        total = self._sum([copied.get(i, value) for i in range(replicas)])
        result = total
        for i in others:
            received = jax.lax.ppermute(total, axis_name, [(self._root, i)])
            result = jnp.where(me == i, received, result)
        return assume_mirrored(result)

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
