"""Batches of Grain datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

from distribute_jax._messages import PyTree
from distribute_jax.data.sources._base import Source, on_host

_READ_AHEAD = 4
"""Batches that Grain reads ahead, in one thread each; its default of 500 would fill the memory."""
_INFINITE = 2**40
"""Grain's endless repeat has a huge length, which ``batch`` divides; no finite dataset reaches this one."""


class GrainMap(Source):
    """A ``grain.MapDataset`` of batches; its random transformations differ between epochs."""

    text = "a grain.MapDataset"
    can_resume = True

    def __init__(self, dataset: Any, method: str) -> None:
        self._dataset = dataset
        self.is_infinite = len(dataset) >= _INFINITE

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        import grain

        options = grain.ReadOptions(num_threads=_READ_AHEAD, prefetch_buffer_size=_READ_AHEAD)
        # Indices of a repeated dataset continue through its epochs; an endless one has a single epoch.
        batches = self._dataset if self.is_infinite else self._dataset.repeat(epoch + 1)
        start = 0 if self.is_infinite else epoch * len(self._dataset)
        skipped = position if _filters(self._dataset) else 0
        start += position - skipped
        if start:
            batches = batches.slice(slice(start, None))
        return _rest(batches.to_iter_dataset(options), skipped)

    @property
    def length(self) -> int | None:
        return None if self.is_infinite or _filters(self._dataset) else len(self._dataset)


class GrainIter(Source):
    """A ``grain.IterDataset`` or ``grain.DataLoader`` of batches.

    Every epoch is the same, as in Grain, and it resumes by reading all earlier batches.
    """

    can_resume = True

    def __init__(self, dataset: Any, method: str) -> None:
        self._dataset = dataset

    @property
    def text(self) -> str:
        return f"a Grain {type(self._dataset).__name__}"

    @property
    def batching(self) -> str:
        if hasattr(self._dataset, "batch"):
            return super().batching
        return f"Add grain.transforms.Batch(256) to the operations of this {self.text[2:]}."

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        return _rest(self._dataset, position)


def _rest(dataset: Any, skipped: int) -> Iterator[PyTree]:
    iterator = iter(dataset)
    # Grain's threads and processes stop as soon as the loop is left, not at garbage collection.
    with closing(iterator) if hasattr(iterator, "close") else nullcontext():
        yield from map(on_host, islice(iterator, skipped, None))


def _filters(dataset: Any) -> bool:
    """True if a filter removes elements, so that an index is not the number of a batch."""
    import grain

    filtered = type(grain.MapDataset.range(1).filter(bool))
    return isinstance(dataset, filtered) or any(map(_filters, dataset.parents))
