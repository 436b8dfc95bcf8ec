"""Batches of an iterator, of another iterable, or of a function that returns one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from distribute_jax._absent import describe_foreign
from distribute_jax._checks import converting, takes
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, is_array, leaf_text
from distribute_jax._values import DistributedValues
from distribute_jax.data.sources._base import Stream, on_host

_SLICES = "[(x[i:i + 256], y[i:i + 256]) for i in range(0, len(x), 256)]"


def from_iterable(source: Any, method: str) -> Stream:
    """Returns the source of an iterable or a function; raises an ArgumentError for likely mistakes."""
    is_source = _is_iterable(source) or callable(source)
    if isinstance(source, Mapping) or describe_foreign(source) or not is_source:
        got = "got from its function" if method.endswith("from_function") else "got"
        raise ArgumentError(
            f"{method} {got} {leaf_text(source)}, which is not an iterable of global batches or a function "
            "that returns one. Batch the data first, for example dj.data.from_arrays((x, y)).batch(256), "
            f"or {_SLICES}."
        )
    if isinstance(source, DistributedValues):
        raise ArgumentError(
            f"{method} got a {source!r:.80}, which is distributed already. Pass the dataset or arrays on "
            "the host; distributed values go straight to strategy.run(step, args=batch)."
        )
    if _rows(source) is not None or is_array(source):
        raise ArgumentError(
            f"{method} got one array, {leaf_text(source)}, which would be split into single examples. "
            "It takes an iterable of global batches: a list of one, [x], or several, "
            "dj.data.from_arrays(x).batch(256)."
        )
    if _is_one_batch(source):
        raise ArgumentError(
            f"{method} got a tuple of {len(source)} arrays with {_rows(source[0])} rows each, which would be "
            f"read as {len(source)} batches. To batch corresponding rows pass dj.data.from_arrays((x, "
            "y)).batch(256); for one global batch a list of it, [(x, y)]; for several a list, [x, y]."
        )
    if not _is_iterable(source) and not takes(source):
        raise ArgumentError(
            f"{method} calls the function at the start of each epoch without arguments, and {source!r:.60} "
            "requires some. Pass a function of a dj.InputContext to "
            "strategy.distribute_datasets_from_function."
        )
    return _Iterable(source, method)


_claims: weakref.WeakValueDictionary[int, _Claim] = weakref.WeakValueDictionary()
"""By the ``id`` of the iterator."""

_latest_kept: list[_Claim] = []
"""That of the latest iterator without weak references, such as a ``zip``."""


class _Claim:
    """Reserves an iterator for a source; raises if another one has it, with which it would share batches."""

    def __init__(self, iterator: Iterator[Any], method: str) -> None:
        other = _claims.get(id(iterator))
        # The id of a freed iterator can be reused, and a claim need not keep its iterator alive.
        if other is not None and other.iterator() is iterator:
            raise ArgumentError(
                f"{leaf_text(iterator)} was given to two distributed datasets, and each would get only the "
                f"batches that the other has not read, also ahead of its loop. {_pass_factory(method)} Or "
                "distribute it once, and go on with one iterator of the dataset, batches = iter(dataset)."
            )
        self.iterator: Callable[[], Any] = lambda: iterator
        # Weak if possible, so that an unfinished generator is closed when the loop drops it.
        with suppress(TypeError):
            self.iterator = weakref.ref(iterator)
        _claims[id(iterator)] = self

    def keep(self, iterator: Iterator[Any]) -> None:
        """Stays after the source was freed, which may have read batches that nobody took."""
        if isinstance(self.iterator, weakref.ref):
            weakref.finalize(iterator, id, self).atexit = False
        else:
            _latest_kept[:] = [self]


class _Iterable(Stream):
    """An iterator, another iterable of batches, or a function that returns one."""

    batching = f"Batch the source first, for example {_SLICES}."

    def __init__(self, source: Any, method: str) -> None:
        super().__init__(source, method)
        self.runs_user_code = type(source) not in (list, tuple)
        self._claim = _Claim(source, method) if isinstance(source, Iterator) else None
        self._is_started = False

    @property
    def text(self) -> str:
        return leaf_text(self._dataset)

    def start(self) -> Iterator[PyTree]:
        batches = self._dataset if _is_iterable(self._dataset) else self._dataset()
        if not _is_iterable(batches):
            raise ArgumentError(
                f"The function {self._dataset!r:.60} given to {self._method} returned {leaf_text(batches)}. "
                "It must return an iterable of global batches, or be a generator that yields them."
            )
        with converting(self._method, batches, "an iterable of global batches"):
            iterator: Iterator[Any] = (
                iter(batches) if hasattr(type(batches), "__iter__") else _items(batches)
            )
        if self._claim is None or self._claim.iterator() is not iterator:
            self._claim = _Claim(iterator, self._method)
        elif self._is_started:
            raise ArgumentError(
                f"A distributed dataset was started a second time, but {self.text} is or returned the same "
                f"iterator a second time, and its batches are used up. {_pass_factory(self._method)}"
            )
        self._claim.keep(iterator)
        self._is_started = True
        read, on_epoch_end = map(on_host, iterator), getattr(batches, "on_epoch_end", None)
        return _then(read, on_epoch_end) if callable(on_epoch_end) else read  # of Keras's PyDataset


def _pass_factory(method: str) -> str:
    # The function of a context is called once, and what it returns at the start of each epoch.
    call = " context: make_batches" if method.endswith("from_function") else ": make_batches()"
    return (
        "Pass something that starts again for every epoch: a list of batches, or a function that "
        f"returns a new iterator, {method}(lambda{call})."
    )


def _is_one_batch(source: Any) -> bool:
    """True for ``(x, y)``: a tuple of equally long arrays."""
    rows = set(map(_rows, source)) if isinstance(source, tuple) and len(source) > 1 else {None}
    return len(rows) == 1 and None not in rows


def _rows(source: Any) -> int | None:
    """Returns the length of dim 0 of an array, tensor or table; None for anything else."""
    shape: Any = getattr(source, "shape", None)
    return int(shape[0]) if hasattr(type(shape), "__len__") and len(shape) else None


def _is_iterable(source: Any) -> bool:
    return hasattr(type(source), "__iter__") or hasattr(type(source), "__getitem__")


def _items(source: Any) -> Iterator[Any]:
    """Iterates an object with ``__getitem__``, up to its length if it has one."""
    if hasattr(type(source), "__len__"):
        return (source[i] for i in range(len(source)))
    return iter(source)


def _then(batches: Iterator[PyTree], call: Callable[[], Any]) -> Iterator[PyTree]:
    yield from batches
    call()
