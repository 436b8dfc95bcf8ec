"""The batches of an epoch, counted, with a look ahead; and a batch as inputs, targets and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from distribute_jax._errors import ArgumentError, DistributeError
from distribute_jax._messages import PyTree, error_text, leaf_text
from distribute_jax._values import DistributedValues, PerReplica
from distribute_jax.data import DistributedDataset
from distribute_jax.strategies import get_replica_context


@dataclass(frozen=True)
class Keys:
    """Which entries of a batch that is a dict are the inputs and the targets.

    Each is None, the name of an entry, or a list of names for a dict of these entries.
    """

    x: Any = None
    y: Any = None

    def __bool__(self) -> bool:
        """Whether any was passed."""
        return self.x is not None or self.y is not None

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Returns a batch as the positional arguments of a step: ``(x,)``, ``(x, y)``, …."""
        if not self:
            return as_arguments(batch)
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
    """Elements of a distributed dataset as arguments of a step."""

    def __init__(self, dataset: DistributedDataset, keys: Keys | None = None) -> None:
        """Starts an epoch of the dataset."""
        self.iterator = iter(dataset)
        self.keys = keys or Keys()
        self.names: list[str] = []
        """The entries of a batch that is a dict, where no key says which of them is what."""
        self.length = dataset.cardinality
        self.taken = 0
        self.examples = 0
        self._next: list[tuple[Any, ...]] = []

    def peek(self) -> tuple[Any, ...] | None:
        """Gives the next batch and leaves it; None at the end."""
        if not self._next:
            found = next(self.iterator, _END)
            if found is _END:
                return None
            self.names = (
                sorted(map(repr, found)) if isinstance(found, dict) and not self.keys else []
            )
            self._next.append(self.keys.arguments(found))
        return self._next[0]

    def position(self) -> str:
        """Says where the next batch comes from, as text; an empty one where the source cannot seek."""
        try:
            return "" if self._next else json.dumps(self.iterator.state())
        except ArgumentError:
            return ""

    def go_on(self, number: int, position: str) -> None:
        """Goes to where a training stood after so many batches, by reading them if there is no position."""
        if position:
            self.iterator.restore(json.loads(position))
            self.taken = number
            return
        for _ in range(number):
            next(self, None)

    def __next__(self) -> tuple[Any, ...]:
        """Gives the next batch."""
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self._next.clear()
        self.taken += 1
        self.examples += _real_rows(batch)
        return batch


_END = object()


@contextmanager
def dicts_explained(called: str, batches: Batches) -> Iterator[None]:
    """Says what to write where a step fails on a batch that is a dict, which the module got as it is.

    Raises:
        ArgumentError: in place of an error that is not one of ours, which gets a note.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if not batches.names:
            raise
        more = "" if called == "predict" else ", y_key=…"
        parts = 'batch["…"]' if called == "predict" else '(batch["…"], batch["…"])'
        text = (
            f"{called} got batches that are dicts of {', '.join(batches.names)}, and gave each to the module "
            f"as one input, without targets. Say which entry is what, {called}(dataset, x_key=…{more}), or "
            f"dataset.map(lambda batch: {parts})."
        )
        if isinstance(error, DistributeError):
            error.add_note(text)
            raise
        raise ArgumentError(f"{text} The step failed: {error_text(error)}") from error


def _real_rows(batch: tuple[Any, ...]) -> int:
    """Counts the real examples of a global batch, without asking the devices."""
    for leaf in jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, DistributedValues)):
        if isinstance(leaf, PerReplica):
            return sum(leaf.counts) if leaf.counts else int(leaf.global_array.shape[0])
        if getattr(leaf, "ndim", 0):
            return int(leaf.shape[0])
    return 0


def unpack_x_y_sample_weight(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Takes a batch apart; what it does not hold is None.

    Args:
        batch: a tuple or list ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, or the inputs alone.

    Raises:
        ValueError: a tuple of more parts.

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
            f"A batch of {len(batch)} parts was given. A tuple is (x,), (x, y) or (x, y, "
            "sample_weight): put several inputs into a dict, ({'a': a, 'b': b}, y)."
        )
    x, y, weight = (*batch, None, None)[:3]
    return x, y, weight


def as_arguments(batch: PyTree) -> tuple[PyTree, ...]:
    """Gives a batch as the positional arguments of a step."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def rows_of(tree: PyTree) -> int:
    """Gives the number of rows of this replica's share, padding included."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "ndim", 0)]
    if not leaves:
        raise ArgumentError(
            f"The inputs of a batch hold no array of examples, but {leaf_text(tree)}. Pass arrays "
            "whose dim 0 is the batch."
        )
    return int(leaves[0].shape[0])


def real_examples(rows: int) -> tuple[Any, Any]:
    """Counts the real examples of this replica, and of the global batch."""
    replica = get_replica_context()
    if replica.is_padded:
        return replica.batch_mask.sum(), replica.real_examples
    return rows, rows * replica.num_replicas_in_sync
