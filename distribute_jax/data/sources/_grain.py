"""Batches of Grain datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree
from distribute_jax.data.sources._base import Seekable, on_host

_AHEAD = 4
"""Batches that Grain's threads read ahead, one thread each; Grain's own 500 would fill the memory."""
_INFINITE = 2**40
"""Grain repeats without end by a huge length, which ``batch`` then divides; no data has so many batches."""


class GrainMap(Seekable):
    """A ``grain.MapDataset`` of batches; its random transformations are seeded anew in each epoch."""

    text = "a grain.MapDataset"

    def __init__(self, dataset: Any, called: str) -> None:
        try:
            len(dataset)
        except OverflowError:
            raise ArgumentError(
                f"{called} got {self.text} that Grain cannot read: repeat() without end and then "
                "batch(1) gives it more batches than Python counts. Call batch first, then repeat()."
            ) from None
        self._dataset = dataset

    @property
    def is_infinite(self) -> bool:
        """See ``Source.is_infinite``."""
        return len(self._dataset) >= _INFINITE

    @property
    def batching(self) -> str:
        """See ``Source.batching``."""
        return _batching(self.text)

    def read(self, epoch: int, position: int) -> Iterator[PyTree]:
        """See ``Seekable.read``."""
        import grain

        options = grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)
        count = len(self._dataset)
        # A repeated dataset counts on through its epochs. One without end has only one.
        batches = self._dataset if self.is_infinite else self._dataset.repeat(epoch + 1)
        start = 0 if self.is_infinite else epoch * count
        skipped = 0
        if _leaves_out(self._dataset):
            skipped = position
        else:
            start += position
        if start:
            batches = batches.slice(slice(start, None))
        return _rest(batches.to_iter_dataset(options), skipped)

    def __len__(self) -> int:
        """See ``Source.__len__``."""
        if self.is_infinite or _leaves_out(self._dataset):
            raise TypeError("the number of batches of this grain.MapDataset is unknown or infinite")
        return len(self._dataset)


class GrainIter(Seekable):
    """A ``grain.IterDataset`` or ``grain.DataLoader`` of batches.

    Every epoch is the same, as in Grain, and it seeks by reading what comes before.
    """

    def __init__(self, dataset: Any, called: str) -> None:
        self._dataset = dataset

    @property
    def text(self) -> str:
        """See ``Source.text``."""
        return f"a Grain {type(self._dataset).__name__}"

    @property
    def batching(self) -> str:
        """See ``Source.batching``."""
        if hasattr(self._dataset, "batch"):
            return _batching(self.text)
        return f"Add grain.transforms.Batch(256) to the operations of this {self.text[2:]}."

    def read(self, epoch: int, position: int) -> Iterator[PyTree]:
        """See ``Seekable.read``."""
        return _rest(self._dataset, position)


def _rest(dataset: Any, skipped: int) -> Iterator[PyTree]:
    iterator = iter(dataset)
    # Grain's threads and processes stop at once where the loop is left, not when garbage is collected.
    with closing(iterator) if hasattr(iterator, "close") else nullcontext():
        yield from map(on_host, islice(iterator, skipped, None))


def _batching(text: str) -> str:
    return f"Call .batch(256) on this {text[2:]}, which gives single examples."


def _leaves_out(dataset: Any) -> bool:
    """Tells whether some elements are missing, so that the index is not the number of the batch."""
    import grain

    filters = type(grain.MapDataset.range(1).filter(bool))
    return isinstance(dataset, filters) or any(map(_leaves_out, dataset.parents))
