"""Options of distributed datasets, TensorFlow's policies, and ``InputContext``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from distribute_jax._errors import ArgumentError


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


HINT_REFUSED = (
    "AutoShardPolicy.HINT puts numbers into a placeholder of the user's own ds.shard(…), which only "
    "a TensorFlow graph has. Shard in strategy.distribute_datasets_from_function, whose function "
    "gets the numbers: ds.shard(context.num_input_pipelines, context.input_pipeline_id)."
)


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How a strategy's dataset distributes its batches.

    The fields that begin with ``experimental_`` are TensorFlow's.

    Raises:
        ArgumentError: a value is none of those allowed, or two do not go together.

    Example:
        >>> import distribute_jax as dj
        >>> dj.InputOptions(partial="drop").partial
        <PartialPolicy.DROP: 'drop'>

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    __module__ = "distribute_jax"

    partial: PartialPolicy | str = PartialPolicy.MASK
    """What becomes of a batch that does not fill every replica's share: a policy or its name."""
    auto_shard_policy: AutoShardPolicy | str | None = None
    """Which part each process reads: a policy or its name; None for the source's own, else AUTO."""
    experimental_fetch_to_device: bool | None = None
    """Whether batches are put on the devices ahead of the step; None means True."""
    experimental_replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER
    """For whom ``distribute_datasets_from_function`` calls its function: a mode or its name."""
    experimental_place_dataset_on_device: bool = False
    """TensorFlow's wish to build the pipeline on the devices. It runs on the host all the same."""
    experimental_per_replica_buffer_size: int = 2
    """How many global batches may be ready on the devices ahead of the step."""

    def __post_init__(self) -> None:
        """Turns names into members, and refuses what is neither or does not go together."""
        self._set("partial", _member(PartialPolicy, "partial", self.partial))
        mode = _member(InputReplicationMode, _MODE, self.experimental_replication_mode)
        self._set(_MODE, mode)
        if self.auto_shard_policy is not None:
            policy = _member(AutoShardPolicy, "auto_shard_policy", self.auto_shard_policy)
            if policy is AutoShardPolicy.HINT:
                raise ArgumentError(f"InputOptions(auto_shard_policy=HINT): {HINT_REFUSED}")
            self._set("auto_shard_policy", policy)
        if self.experimental_fetch_to_device is None:
            self._set("experimental_fetch_to_device", True)
        _check_bool("experimental_fetch_to_device", self.experimental_fetch_to_device)
        _check_bool(
            "experimental_place_dataset_on_device", self.experimental_place_dataset_on_device
        )
        _check_depth(self.experimental_per_replica_buffer_size)
        if self.experimental_place_dataset_on_device:
            self._check_placing()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_placing(self) -> None:
        if self.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
            raise ArgumentError(
                "InputOptions(experimental_place_dataset_on_device=True) can not be set with "
                "InputReplicationMode.PER_WORKER, where several devices share a dataset. Leave it "
                "out, or add experimental_replication_mode=dj.InputReplicationMode.PER_REPLICA."
            )
        if self.experimental_fetch_to_device:
            raise ArgumentError(
                "InputOptions(experimental_place_dataset_on_device=True) can not be set together "
                "with experimental_fetch_to_device=True, which is the default: either the dataset "
                "is on the devices, or its batches are sent there. Leave it out, or add "
                "experimental_fetch_to_device=False."
            )


_MODE = "experimental_replication_mode"

_MORE = {
    "partial": "The default, partial='mask', pads partial batches and masks the padding.",
    "auto_shard_policy": "Leave it out for the source's own policy, else AUTO.",
    _MODE: "The default, PER_WORKER, makes one dataset for each process.",
}


def _member(kind: type[enum.Enum], field: str, value: Any) -> Any:
    """Gives the member of an enumeration that a value is or names, in any letter case."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(repr(name.lower()) for name in kind.__members__)
    raise ArgumentError(
        f"InputOptions({field}={value!r}): {field} must be one of {names}, or a {kind.__name__}. "
        f"{_MORE[field]}"
    )


def _check_bool(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"InputOptions({field}={value!r}): {field} must be True or False.")


def _check_depth(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(
            f"InputOptions(experimental_per_replica_buffer_size={value!r}): the number of batches "
            "that may be ready ahead of the step is an int of at least 0; 0 prepares each when it "
            "is asked for."
        )


@dataclass(frozen=True)
class InputContext:
    """For which part of the input a function makes its dataset.

    Raises:
        ArgumentError: a number is no int, a count is below 1, or the id is not below the count.

    Example:
        >>> import distribute_jax as dj
        >>> context = dj.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
        >>> context.get_per_replica_batch_size(12)
        2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext
    """

    __module__ = "distribute_jax"

    num_input_pipelines: int = 1
    """How many datasets are made: one for each process, or each replica."""
    input_pipeline_id: int = 0
    """Which of them this is, from 0."""
    num_replicas_in_sync: int = 1
    """The number of all replicas."""

    def __post_init__(self) -> None:
        """Refuses numbers that no input has."""
        for name, value in vars(self).items():
            least = 0 if name == "input_pipeline_id" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentError(
                    f"InputContext({name}={value!r}): {name} must be an int of at least {least}."
                )
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise ArgumentError(
                f"{self!r}: input_pipeline_id counts from 0, so it must be below "
                "num_input_pipelines."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Gives the batch size with which all replicas together take a global batch.

        Args:
            global_batch_size: the number of examples of one step.

        Returns:
            The number of examples of one replica.

        Raises:
            ArgumentError: the replicas do not divide it.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext#get_per_replica_batch_size
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ArgumentError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync}. Choose a multiple of it, or "
                "let strategy.distribute_dataset divide global batches of any size."
            )
        return share
