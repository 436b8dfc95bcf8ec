"""Options of collectives: the reduction, packing, and the implementation as TensorFlow names it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from distribute_jax._checks import as_member, check_int, check_number


class CommunicationImplementation(enum.Enum):
    """Which algorithm combines the replicas.

    Each is also accepted by its name, in any letter case.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    """The operation of the strategy; XLA's own collectives by default."""
    RING = "RING"
    """A ring of replicas, each of which sends to the next: ``dj.RingAllReduce``."""
    NCCL = "NCCL"
    """XLA's own collectives: NCCL on NVIDIA GPUs, and what each other platform has."""


@dataclass(frozen=True)
class CommunicationOptions:
    """How a call of ``all_reduce`` is to combine the replicas.

    Options of one call override those of the strategy; see :meth:`merge`. They never change the
    numbers by more than rounding: arrays of different dtypes are not packed together, so
    one call may mix them.

    Args:
        bytes_per_pack: arrays of one dtype are joined until a pack holds more than this many bytes; 0
            leaves packing to the cross-device operation. Whole arrays are packed, so packs err on the
            large side. It is a hint: XLA may join small collectives, or none at all.
        timeout_seconds: how long processes wait for each other on the host; None and 0 mean no limit.
            The replicas of one process cannot be late, so ``MirroredStrategy`` has no use for it, and
            a collective inside a compiled step is bounded by XLA's own flags alone.
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
    """The algorithm; a ``CommunicationImplementation`` once made."""

    def __post_init__(self) -> None:
        check_int("CommunicationOptions(bytes_per_pack)", self.bytes_per_pack, 0)
        if self.timeout_seconds is not None:
            check_number(
                "CommunicationOptions(timeout_seconds)",
                self.timeout_seconds,
                at_least=0,
                most=math.inf,
            )
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
        other = options
        is_auto = other.implementation is CommunicationImplementation.AUTO
        return CommunicationOptions(
            bytes_per_pack=other.bytes_per_pack or self.bytes_per_pack,
            timeout_seconds=(
                self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds
            ),
            implementation=self.implementation if is_auto else other.implementation,
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
    """Turns a name in any letter case into a ``ReduceOp``."""
    return as_member("reduce_op", value, ReduceOp)
