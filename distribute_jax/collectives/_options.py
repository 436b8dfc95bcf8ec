"""Options of collectives: the reduction, packing, and the implementation as TensorFlow names it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import cast

from distribute_jax._errors import ArgumentError


class CommunicationImplementation(enum.Enum):
    """Which algorithm combines the replicas.

    Each is also accepted by its name, in any letter case.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    """What the strategy was made with; XLA's own collectives unless it was told otherwise."""
    RING = "RING"
    """A ring of replicas, each of which sends to the next: ``dj.RingAllReduce``."""
    NCCL = "NCCL"
    """XLA's own collectives: NCCL on NVIDIA GPUs, and what each other platform has."""


@dataclass(frozen=True)
class CommunicationOptions:
    """How a call of ``all_reduce`` is to combine the replicas.

    Options given to one call are merged over those of the strategy; see :meth:`merge`. They never
    change the numbers by more than rounding: arrays of different dtypes are not packed together, so
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
        """Turns names into members and refuses what is out of range."""
        if not _is_int(self.bytes_per_pack) or self.bytes_per_pack < 0:
            raise ArgumentError(
                f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack!r}): bytes_per_pack must be "
                "an int, 0 or more. 0 leaves packing to the cross-device operation."
            )
        if not _is_timeout(self.timeout_seconds):
            raise ArgumentError(
                f"CommunicationOptions(timeout_seconds={self.timeout_seconds!r}): timeout_seconds must "
                "be None or a number of seconds, 0 or more. None waits without a limit."
            )
        object.__setattr__(self, "implementation", _implementation(self.implementation))

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options, with each value of the others that is not the default put over them.

        Args:
            options: the options of one call, or None.

        Returns:
            New options; neither of the two changes.

        Raises:
            ValueError: ``options`` is neither None nor ``CommunicationOptions``.
        """
        if options is None:
            return self
        other = checked_options(options, "merge")
        is_auto = other.implementation is CommunicationImplementation.AUTO
        return CommunicationOptions(
            bytes_per_pack=other.bytes_per_pack or self.bytes_per_pack,
            timeout_seconds=(
                self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds
            ),
            implementation=self.implementation if is_auto else other.implementation,
        )


def checked_options(options: object, method: str) -> CommunicationOptions:
    """Returns the options of a call, defaults for None, or raises for another object."""
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise ArgumentError(
            f"{method}(options={options!r:.80}): options must be None or "
            "dj.experimental.CommunicationOptions(bytes_per_pack=..., timeout_seconds=..., "
            "implementation=...)."
        )
    return options


def _implementation(value: object) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    members = CommunicationImplementation.__members__
    if isinstance(value, str) and value.upper() in members:
        return members[value.upper()]
    names = ", ".join(repr(name) for name in members)
    raise ArgumentError(
        f"CommunicationOptions(implementation={value!r}): implementation must be one of {names}, or a "
        "dj.experimental.CommunicationImplementation. 'AUTO' is what the strategy was made with."
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_timeout(value: object) -> bool:
    if value is None:
        return True
    if not (_is_int(value) or isinstance(value, float)):
        return False
    seconds = cast("float", value)
    return seconds >= 0 and not math.isnan(seconds)


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
    if isinstance(value, ReduceOp):
        return value
    if isinstance(value, str) and value.upper() in ReduceOp.__members__:
        return ReduceOp[value.upper()]
    raise ArgumentError(
        f"{value!r} is not a valid ReduceOp. Use 'sum' or 'mean', or dj.ReduceOp.SUM or "
        "dj.ReduceOp.MEAN; only these two combine replicas."
    )
