"""Where the batches come from: anything that can be iterated, once or again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import chain
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import is_array, leaf_text
from distribute_jax._values import DistributedValues


class Source:
    """Global batches on the host, which can be started anew unless the source is one-shot."""

    is_infinite: bool = False
    """Whether an epoch never ends."""
    can_seek: bool = False
    """Whether ``open_at`` can start anywhere."""
    seed: int | None = None
    """The seed of its shuffling, where the source tells it."""
    num_files: int | None = None
    """How many files it reads; None where it reads none, or it cannot be known."""
    own_policy: str | None = None
    """The name of the ``AutoShardPolicy`` that the source itself asks for."""

    def __init__(self, source: Any) -> None:
        if isinstance(source, Mapping) or not (_is_iterable(source) or callable(source)):
            raise ArgumentError(
                f"strategy.distribute_dataset got {leaf_text(source)}, which is no iterable of "
                "global batches and no function that returns one. Batch the data first, for "
                "example [(x[i:i + 256], y[i:i + 256]) for i in range(0, len(x), 256)]."
            )
        if is_array(source) or isinstance(source, DistributedValues):
            raise ArgumentError(
                f"strategy.distribute_dataset got one array, {leaf_text(source)}, which would be taken "
                "apart into single examples. It takes an iterable of global batches: a list of one, "
                "[x], or several, [x[i:i + 256] for i in range(0, len(x), 256)]."
            )
        self._source = source
        self._is_iterator = _is_iterable(source) and isinstance(source, Iterator)
        self._was_opened = False
        self._seen: list[Any] = []
        self._last: Callable[[], Any] = lambda: None

    @property
    def text(self) -> str:
        """What messages call it."""
        return leaf_text(self._source)

    def open(self) -> Iterator[Any]:
        """Starts the batches from the first one; a one-shot source can be opened once."""
        if not self._is_iterator:
            return self._start()
        self._check_fresh()
        self._was_opened = True
        return chain(self._seen, self._source)

    def preview(self) -> Iterator[Any]:
        """Gives the batches from the first one without using up a one-shot source."""
        if not self._is_iterator:
            yield from self._start()
            return
        self._check_fresh()
        yield from tuple(self._seen)
        for batch in self._source:
            self._seen.append(batch)
            yield batch

    def __len__(self) -> int:
        """The number of batches; a TypeError where the source does not know it."""
        if not isinstance(self._source, Sized):
            raise TypeError(f"{leaf_text(self._source)} has no length")
        return len(self._source)

    def open_at(self, epoch: int, position: int) -> Iterator[Any]:
        """Starts at batch ``position`` of epoch ``epoch``, both from 0."""
        raise ArgumentError(f"{self.text} cannot start at batch {position} of epoch {epoch}")

    def shard_files(self, count: int, index: int) -> Source | None:
        """Gives a source of the files index, index + count, …; None where it reads no files."""
        return None

    def _check_fresh(self) -> None:
        if self._was_opened:
            raise _used_up(f"{leaf_text(self._source)} is an iterator, and its batches are used up")

    def _start(self) -> Iterator[Any]:
        batches = self._source if _is_iterable(self._source) else self._source()
        if not _is_iterable(batches):
            raise ArgumentError(
                f"The function {self._source!r:.60} given to strategy.distribute_dataset returned "
                f"{leaf_text(batches)}. It must return an iterable of global batches, or be a "
                "generator that yields them."
            )
        iterator: Iterator[Any] = iter(batches)
        if self._last() is iterator:
            raise _used_up(f"{leaf_text(self._source)} gave the same iterator a second time")
        self._last = _reference(iterator)
        return iterator


def find_source(source: Any, called: str = "strategy.distribute_dataset") -> Source:
    """Gives the source of the batches in whatever the user passed."""
    del called
    return Source(source)


def _used_up(what: str) -> ArgumentError:
    return ArgumentError(
        f"A distributed dataset was started a second time, but {what}. Pass something that starts "
        "anew for every epoch: a list of batches, or a function that makes the iterator, "
        "strategy.distribute_dataset(lambda: make_batches())."
    )


def _is_iterable(source: Any) -> bool:
    return hasattr(type(source), "__iter__") or hasattr(type(source), "__getitem__")


def _reference(iterator: Any) -> Callable[[], Any]:
    # A weak one where possible: a generator left half-way is closed when the loop lets go of it.
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: iterator
