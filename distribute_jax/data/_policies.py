"""The choices of a distributed dataset, as TensorFlow names them."""

from __future__ import annotations

import enum


class AutoShardPolicy(enum.IntEnum):
    """Which part of the data each process reads, where a strategy spans several.

    Each is also accepted by its name, for example ``auto_shard_policy="data"``.

    Source: https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy
    """

    __module__ = "distribute_jax"

    OFF = -1
    """Every process reads everything, and cuts each batch by a fixed schedule."""
    AUTO = 0
    """FILE where the source reads at least one file for each process, else DATA."""
    FILE = 1
    """Process w reads the files w, w + W, … of W processes."""
    DATA = 2
    """Every process reads everything, and takes its part of each batch."""
    HINT = 3
    """TensorFlow's placeholder in the user's own ``shard``. Nothing here can read it."""


class InputReplicationMode(enum.Enum):
    """For whom ``distribute_datasets_from_function`` calls its function.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputReplicationMode
    """

    __module__ = "distribute_jax"

    PER_WORKER = "PER_WORKER"
    """Once for each process; its replicas take the batches in turn."""
    PER_REPLICA = "PER_REPLICA"
    """Once for each replica, which takes all of its batches."""


class PartialPolicy(enum.Enum):
    """What becomes of a batch that does not fill every replica's share.

    Each is also accepted by its name, for example ``partial="drop"``.
    """

    __module__ = "distribute_jax"

    MASK = "mask"
    """Pad it to the shape of the full batches, and mask the padding: one more program in all."""
    SHRINK = "shrink"
    """Make shares no longer than needed, padded only where they differ: one program per size."""
    DROP = "drop"
    """Skip it, so that every element has the same shape and no padding."""
    ERROR = "error"
    """Raise an ArgumentError."""
