"""The batches of an epoch, and their split into inputs, targets and sample weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, leaf_text
from distribute_jax._values import DistributedValues, PerReplica
from distribute_jax.data import DistributedDataset
from distribute_jax.data._dataset import batch_layout, observe, observed
from distribute_jax.strategies import get_replica_context
from distribute_jax.training._objective import LabelCheck


@dataclass(frozen=True)
class Keys:
    """Which entries of a dict batch are its inputs and targets: a name, or a list for a dict of several."""

    x: Any = None
    y: Any = None

    def __bool__(self) -> bool:
        return self.x is not None or self.y is not None

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Returns a batch as a step's positional arguments: ``(x,)``, ``(x, y)`` or with weights."""
        if not self:
            return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(batch, dict):
            raise ArgumentError(
                f"x_key={self.x!r}, y_key={self.y!r} name entries of batches that are dicts, and a "
                f"batch is a {type(batch).__name__}. Leave them out."
            )
        if self.x is None:
            raise ArgumentError(
                f"y_key={self.y!r} was passed without x_key. Pass both, of {sorted(batch)}."
            )
        return tuple(_entry(batch, key) for key in (self.x, self.y) if key is not None)


def _entry(batch: dict[Any, Any], key: Any) -> Any:
    if isinstance(key, (list, tuple)):
        return {one: _entry(batch, one) for one in key}
    if key not in batch:
        raise ArgumentError(f"A batch has no entry {key!r}. Its entries are {sorted(batch)}.")
    return batch[key]


class Batches(Iterator[tuple[Any, ...]]):
    """Iterates over the batches of one epoch as arguments of a step; counts them and can peek."""

    def __init__(self, dataset: DistributedDataset, keys: Keys | None = None) -> None:
        self.dataset = dataset
        self.iterator = iter(dataset)
        self._dealt_to = batch_layout(dataset)
        self.keys = keys or Keys()
        self.names: list[str] = []
        """The names in dict batches, if no keys were passed."""
        self.count = self.examples = 0
        self._next: list[tuple[Any, ...]] = []
        self._labels: LabelCheck | None = None

    def observe_labels(self, labels: LabelCheck) -> None:
        """Computes the label range of every batch while it is on the host."""
        keys = self.keys  # the prefetching thread must not hold a reference to self

        def ranges(batch: PyTree) -> Any:
            with suppress(ArgumentError):
                return labels.ranges((*keys.arguments(batch), None, None)[1])

        observe(self.iterator, ranges)

    def check_labels(self, labels: LabelCheck) -> None:
        """Checks the labels of the newest batch and of all later ones, if they were on the host."""
        labels.add(observed(self.iterator) or {}, f" in batch {self.count} of the dataset")
        self._labels = labels

    def peek(self) -> tuple[Any, ...] | None:
        """Returns the next batch without taking it; None at the end."""
        if not self._next:
            batch = next(self.iterator, _END)
            if batch is _END:
                return None
            if isinstance(batch, dict) and not self.keys:
                self.names = sorted(map(repr, batch))
            self._next.append(self.keys.arguments(batch))
            if self._labels is not None:
                self.check_labels(self._labels)
        return self._next[0]

    def position(self) -> str:
        """Returns the data position of the next batch, or, if there is none, to which replicas it goes."""
        with suppress(ArgumentError):  # the source cannot seek
            if not self._next:
                return json.dumps(self.iterator.state())
        return self._dealt_to

    def resume(self, count: int, position: str) -> None:
        """Continues after ``count`` batches; without a ``position`` it reads and drops them."""
        if position.startswith("{"):
            self.iterator.restore(json.loads(position))
            self.count = count
            return
        if position != self._dealt_to:
            raise ArgumentError(
                f"fit cannot continue in the middle of an epoch: a batch of {position or 'one reader'} and "
                f"one of {self._dealt_to or 'one reader'} are not the same examples. Distribute global "
                'batches that every process reads, dj.InputOptions(auto_shard_policy="data"), or save only '
                "at the end of an epoch."
            )
        for _ in range(count):
            next(self, None)

    def __next__(self) -> tuple[Any, ...]:
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self._next.clear()
        self.count += 1
        self.examples += _real_rows(batch)
        return batch


_END = object()


@contextmanager
def hint(text: Callable[[Exception], str]) -> Iterator[None]:
    """Adds a note to an error that the block raises, unless ``text`` returns an empty string."""
    try:
        yield
    except Exception as error:
        if note := text(error):
            error.add_note(note)
        raise


INPUT_ERRORS = (TypeError, ValueError, AttributeError, KeyError)
"""Errors that a module raises if its inputs are not those that it expects."""


def dict_hint(method: str, batches: Batches, error: Exception) -> str:
    """Returns what to write if the module failed on dict batches, which it gets as they are."""
    if not batches.names or not isinstance(error, INPUT_ERRORS):
        return ""
    y_key, parts = ", y_key=…", '(batch["…"], batch["…"])'
    if method == "predict":
        y_key, parts = "", 'batch["…"]'
    return (
        f"{method} got batches that are dicts of {', '.join(batches.names)}, and passed each to the module "
        f"as one input, without targets. Say which entry is what, {method}(dataset, x_key=…{y_key}), or "
        f"dataset.map(lambda batch: {parts})."
    )


def _real_rows(batch: tuple[Any, ...]) -> int:
    """Returns the number of real examples in a global batch, without reading from the devices."""
    for leaf in jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, DistributedValues)):
        if isinstance(leaf, PerReplica):
            return sum(leaf.counts) if leaf.counts else int(leaf.global_array.shape[0])
    return 0


def unpack_x_y_sample_weight(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Splits a batch into inputs, targets and sample weights; those that it lacks are None.

    Args:
        batch: a tuple or list ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, or the inputs alone.

    Raises:
        ValueError: a tuple of more than three parts.

    Example:
        >>> import distribute_jax as dj
        >>> dj.unpack_x_y_sample_weight((1, 2))
        (1, 2, None)

    Source: https://keras.io/api/utils/data_loading_utils/
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise ArgumentError(
            "Expected a batch (x,), (x, y) or (x, y, sample_weight); got a tuple of "
            f"{len(batch)}. Put several inputs into a dict, ({{'a': a, 'b': b}}, y)."
        )
    x, y, weight = (*batch, None, None)[:3]
    return x, y, weight


def example_counts(x: PyTree) -> tuple[Any, Any]:
    """Returns the numbers of real examples of this replica and of the global batch."""
    leaves = [leaf for leaf in jax.tree.leaves(x) if getattr(leaf, "ndim", 0)]
    if not leaves:
        raise ArgumentError(
            f"The inputs of a batch hold no array of examples, but {leaf_text(x)}. Pass arrays "
            "whose dim 0 is the batch."
        )
    replica = get_replica_context()
    if replica.is_padded:
        return replica.batch_mask.sum(dtype=jnp.int32), replica.real_examples
    rows = int(leaves[0].shape[0])
    return rows, rows * replica.num_replicas_in_sync
