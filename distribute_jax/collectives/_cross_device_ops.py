"""``CrossDeviceOps``: the interface of all-reduce algorithms; and that of XLA, the default."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax._messages import leaf_text
from distribute_jax.collectives._markers import assume_mirrored


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
    summed: jax.Array = sum_p.bind(value, jaxpr=jaxpr, function=function, name=name)
    return summed


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
        """See the base class."""
        summed: jax.Array = jax.lax.psum(value, axis_name)
        return summed
