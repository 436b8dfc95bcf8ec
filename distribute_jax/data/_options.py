"""Options of distributed datasets, TensorFlow's policies, and ``InputContext``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distribute_jax._checks import as_member, check_int
from distribute_jax._errors import ArgumentError


class AutoShardPolicy(enum.IntEnum):
    """Which part of the data each process of a job reads.

    Each is also accepted by its name, for example ``auto_shard_policy="data"``.

    Source: https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy
    """

    OFF = -1
    """Every process reads everything, and cuts each batch by a fixed schedule."""
    AUTO = 0
    """FILE if the source reads at least one file for each process, else DATA."""
    FILE = 1
    """Process w reads the files w, w + W, … of W processes."""
    DATA = 2
    """Every process reads everything, and takes its part of each batch."""
    HINT = 3
    """A placeholder in the user's ``shard`` that TensorFlow fills in; refused."""


class InputReplicationMode(enum.Enum):
    """How often ``distribute_datasets_from_function`` calls its function.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputReplicationMode
    """

    PER_WORKER = "PER_WORKER"
    """Once for each process; its replicas take the batches in turn."""
    PER_REPLICA = "PER_REPLICA"
    """Once for each replica, which takes all of its batches."""


class PartialPolicy(enum.Enum):
    """What happens to a batch that does not fill every replica's share.

    Each is also accepted by its name, for example ``partial="drop"``.
    """

    MASK = "mask"
    """Pad it to the shape of the full batches, and mask the padding: one more program in total."""
    SHRINK = "shrink"
    """Make shares only as long as needed, padded only where they differ: one program for each size."""
    DROP = "drop"
    """Skip it, so that every element has the same shape and no padding."""
    ERROR = "error"
    """Raise an ArgumentError."""


HINT_REFUSED = (
    "AutoShardPolicy.HINT fills a placeholder of the user's ds.shard(…), which only a TensorFlow graph "
    "has. Shard in strategy.distribute_datasets_from_function, whose function gets the numbers: "
    "ds.shard(context.num_input_pipelines, context.input_pipeline_id)."
)


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How a strategy's dataset distributes its batches.

    The fields that begin with ``experimental_`` are TensorFlow's.

    Raises:
        ArgumentError: a value is not allowed, or two exclude each other.

    Example:
        >>> import distribute_jax as dj
        >>> dj.InputOptions(partial="drop").partial
        <PartialPolicy.DROP: 'drop'>

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    partial: PartialPolicy | str = PartialPolicy.MASK
    """What happens to a batch that does not fill every replica's share: a policy or its name."""
    auto_shard_policy: AutoShardPolicy | str | None = None
    """Which part each process reads: a policy or its name; None for that of the source, else AUTO."""
    experimental_fetch_to_device: bool | None = None
    """Whether batches are put on the devices ahead of the step; None means True."""
    experimental_replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER
    """How often ``distribute_datasets_from_function`` calls its function: a mode or its name."""
    experimental_place_dataset_on_device: bool = False
    """Accepted for TensorFlow's signature: the pipeline runs on the host in any case."""
    experimental_per_replica_buffer_size: int = 2
    """How many global batches may be ready on the devices ahead of the step."""

    def __post_init__(self) -> None:
        self._set("partial", as_member, PartialPolicy)
        self._set("experimental_replication_mode", as_member, InputReplicationMode)
        if self.auto_shard_policy is not None:
            self._set("auto_shard_policy", as_member, AutoShardPolicy)
        if self.auto_shard_policy is AutoShardPolicy.HINT:
            raise ArgumentError(f"InputOptions(auto_shard_policy=HINT): {HINT_REFUSED}")
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        self._set("experimental_per_replica_buffer_size", check_int, 0, 1 << 16)
        if self.experimental_place_dataset_on_device and (
            self.experimental_replication_mode is not InputReplicationMode.PER_REPLICA
            or self.experimental_fetch_to_device
        ):
            raise ArgumentError(
                "InputOptions(experimental_place_dataset_on_device=True) cannot be set with "
                "InputReplicationMode.PER_WORKER, where several devices share a dataset, nor with "
                "experimental_fetch_to_device=True, which is the default."
            )

    def _set(self, field: str, check: Callable[..., Any], *args: Any) -> None:
        """Checks a field, and replaces a name by the member of that name."""
        value = check(f"InputOptions({field})", getattr(self, field), *args)
        object.__setattr__(self, field, value)


@dataclass(frozen=True)
class DatasetCreator:
    """A function that creates a dataset, which ``fit`` and ``evaluate`` take in place of a dataset.

    They pass it to ``strategy.distribute_datasets_from_function``.

    Raises:
        TypeError: ``dataset_fn`` is not a function.

    Example:
        >>> import distribute_jax as dj, numpy as np
        >>> def dataset_fn(context):
        ...     size = context.get_per_replica_batch_size(4)
        ...     return [(np.ones((size, 1)), np.ones((size, 1)))] * 3
        >>> creator = dj.DatasetCreator(dataset_fn)
        >>> creator.dataset_fn is dataset_fn
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/utils/experimental/DatasetCreator
    """

    dataset_fn: Callable[[InputContext], Any]
    """Takes an ``InputContext``, and returns a dataset of per-replica batches."""
    input_options: InputOptions | None = None
    """How the batches are distributed."""


@dataclass(frozen=True)
class InputContext:
    """The part of the input for which a function creates its dataset.

    Raises:
        ArgumentError: a number is not an int, a count is below 1, or the id is not below the count.

    Example:
        >>> import distribute_jax as dj
        >>> context = dj.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
        >>> context.get_per_replica_batch_size(12)
        2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext
    """

    num_input_pipelines: int = 1
    """How many datasets are created: one for each process, or for each replica."""
    input_pipeline_id: int = 0
    """Which of them this is, from 0."""
    num_replicas_in_sync: int = 1
    """The number of replicas of all processes."""

    def __post_init__(self) -> None:
        pipelines = check_int("InputContext(num_input_pipelines)", self.num_input_pipelines)
        check_int("InputContext(input_pipeline_id)", self.input_pipeline_id, 0, pipelines)
        check_int("InputContext(num_replicas_in_sync)", self.num_replicas_in_sync)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica, with which all replicas together process a global batch.

        Args:
            global_batch_size: the number of examples of one step.

        Returns:
            The number of examples of one replica.

        Raises:
            ArgumentError: it is below 1, or not divisible by the number of replicas.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext#get_per_replica_batch_size
        """
        size = check_int("get_per_replica_batch_size(global_batch_size)", global_batch_size)
        share, rest = divmod(size, self.num_replicas_in_sync)
        if rest:
            raise ArgumentError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync}. Choose a multiple of it, or "
                "let strategy.distribute_dataset divide global batches of any size."
            )
        return share
