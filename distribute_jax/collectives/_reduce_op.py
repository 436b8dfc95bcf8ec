"""The two ways to combine the replicas' values."""

from __future__ import annotations

import enum

from distribute_jax._errors import ArgumentError


class ReduceOp(enum.Enum):
    """How the replicas' values are combined into one.

    Every method that takes one also takes its name as a string, in any letter case.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    __module__ = "distribute_jax"

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
