"""A reduction: its operation and options, as in TensorFlow, and the dtypes in which it sums."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._checks import as_member, check_int, check_number, refuse
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import is_key, leaf_text, listed


class CommunicationImplementation(enum.Enum):
    """Which algorithm combines the replicas.

    Each is also accepted by its name, in any letter case.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    """The operation of the strategy; XLA's collectives by default."""
    RING = "RING"
    """A ring of replicas, each of which sends to the next: ``dj.RingAllReduce``."""
    NCCL = "NCCL"
    """XLA's collectives: NCCL on NVIDIA GPUs, and those of each other platform."""


@dataclass(frozen=True)
class CommunicationOptions:
    """How a call of ``all_reduce`` combines the replicas.

    Options of one call override those of the strategy; see :meth:`merge`. They change the numbers
    at most by rounding: arrays of different dtypes are not packed together, so one call may mix them.

    Args:
        bytes_per_pack: arrays of one dtype are concatenated until a pack has more than this many bytes; 0
            leaves packing to the cross-device operation. Arrays are not split, so packs may exceed it.
            It is a hint: XLA may combine collectives.
        timeout_seconds: how long processes wait for each other on the host; None and 0 mean no limit.
            It has no effect on ``MirroredStrategy`` in one process, nor on collectives inside a compiled
            step, which are limited only by XLA's flags.
        implementation: a ``CommunicationImplementation`` or its name.

    Raises:
        ValueError: a number is negative or of another type, or the implementation is unknown.

    Example:
        >>> import distribute_jax as dj
        >>> options = dj.experimental.CommunicationOptions(bytes_per_pack=1 << 20)
        >>> options.merge(dj.experimental.CommunicationOptions(implementation="ring")).bytes_per_pack
        1048576

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions
    """

    bytes_per_pack: int = 0
    """Bytes after which a pack is closed; 0 for no limit."""
    timeout_seconds: float | None = None
    """Seconds that processes wait for each other on the host."""
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    """The algorithm; a name is converted to a ``CommunicationImplementation``."""

    def __post_init__(self) -> None:
        check_int("CommunicationOptions(bytes_per_pack)", self.bytes_per_pack, 0)
        if self.timeout_seconds is not None:
            name = "CommunicationOptions(timeout_seconds)"
            check_number(name, self.timeout_seconds, at_least=0, most=math.inf)
        name = "CommunicationOptions(implementation)"
        implementation = as_member(name, self.implementation, CommunicationImplementation)
        object.__setattr__(self, "implementation", implementation)

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options, overridden by each value of the others that is not the default.

        Args:
            options: the options of one call, or None.

        Returns:
            New options; neither of the two changes.

        Raises:
            ValueError: ``options`` is neither None nor ``CommunicationOptions``.
        """
        if options is None:
            return self
        seconds = options.timeout_seconds
        is_auto = options.implementation is CommunicationImplementation.AUTO
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if seconds is None else seconds,
            self.implementation if is_auto else options.implementation,
        )


class ReduceOp(enum.Enum):
    """How the replicas' values are combined into one.

    Every method that takes one also takes its name as a string, in any letter case.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    SUM = "SUM"
    """Add the replicas' values."""
    MEAN = "MEAN"
    """Add them and divide by the number of replicas, or of elements where a dim is reduced too."""


def reduce_op(value: ReduceOp | str) -> ReduceOp:
    name = "reduce_op, the first argument,"
    if isinstance(value, str) and value.lower() in ("max", "min"):
        rule = "'sum' or 'mean'; a maximum is that of dj.get_replica_context().all_gather(values)"
        refuse(name, rule, value)
    return as_member(name, value, ReduceOp)


_REFUSED = """\
{method} got leaves that cannot be combined over the replicas:
{lines}
It takes floating, complex and integer arrays. Convert a bool with value.astype(jnp.int32) in the \
function given to run, and leave other leaves out."""


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype of a sum over the replicas, as of ``jnp.sum``, which widens narrow integers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return dtype
    iinfo: Any = jnp.iinfo
    if iinfo(dtype).bits < 8:  # jnp.sum takes no int4
        dtype = jnp.int8 if iinfo(dtype).min < 0 else jnp.uint8
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def mean_dtype(dtype: Any) -> Any:
    """Returns the dtype of a mean over the replicas: floating."""
    return jnp.result_type(float) if jnp.issubdtype(dtype, jnp.integer) else dtype


def mean_accumulator(dtype: Any) -> Any:
    """Returns the dtype in which values are summed for a mean.

    A sum of float16 values can overflow although their mean does not. bfloat16 has the range of
    float32 and is kept, since float32 would double the traffic.
    """
    finfo: Any = jnp.finfo
    is_short = (
        jnp.issubdtype(dtype, jnp.floating) and finfo(dtype).maxexp < finfo(jnp.bfloat16).maxexp
    )
    return jnp.dtype(jnp.float32) if is_short else mean_dtype(dtype)


def wide(dtype: Any) -> Any:
    """Returns a dtype, at least float32, in which sequential additions lose no bits of a narrow dtype."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def as_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """Converts an array, unless it has the dtype; then it stays weakly typed if it is."""
    return array if array.dtype == dtype else array.astype(dtype)


def check_summable(leaves: Iterable[tuple[str, Any]], method: str) -> None:
    """Raises an error that lists the leaves that are not numbers."""
    bad = [f"{name}: {leaf_text(leaf)}" for name, leaf in leaves if not is_numeric(leaf)]
    if bad:
        raise ArgumentError(_REFUSED.format(method=method, lines=listed(bad)))


def is_numeric(leaf: Any) -> bool:
    """True if a leaf is a number or an array of numbers; bools are not."""
    if isinstance(leaf, (bool, str, bytes)):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (int, float, complex))
    return bool(jnp.issubdtype(dtype, jnp.number))


def is_joinable(leaf: Any) -> bool:
    """True for numbers, bools, random keys and arrays of them, which can be concatenated."""
    dtype = getattr(leaf, "dtype", None)
    is_bool = isinstance(leaf, bool) or (dtype is not None and jnp.issubdtype(dtype, jnp.bool_))
    return is_bool or is_key(leaf) or is_numeric(leaf)
