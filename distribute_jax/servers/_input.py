"""What differs from worker to worker: values, elements of datasets, the worker's number."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    EndOfDataError,
    UnsupportedError,
)
from distribute_jax._values import PerReplica

_current: ContextVar[tuple[Any, bool]] = ContextVar("_current", default=(None, False))
"""The worker that runs this, and whether it is a scheduled function that is traced."""


@contextmanager
def on_worker(index: Any, *, in_closure: bool = False) -> Iterator[None]:
    """Marks the block as run by a worker, and maybe as a scheduled function that is traced."""
    token = _current.set((index, in_closure))
    try:
        yield
    finally:
        _current.reset(token)


def in_closure() -> bool:
    """Returns True while a scheduled function is traced, outside of each ``run`` in it."""
    return _current.get()[1]


def check_not_on_worker() -> None:
    """Refuses what would let a worker wait for itself, or happen once, while a function is traced."""
    if _current.get()[0] is not None:
        raise ContextError(
            "A function that a worker runs, scheduled or for a per-worker dataset, cannot schedule "
            "functions, wait for them or fetch their values, and a function for a dataset cannot run steps. "
            "Do so outside of it, and pass values in args."
        )


def experimental_get_current_worker_index() -> Any:
    """Returns the number of the worker that runs this, from 0.

    Returns:
        An int in a function that makes a dataset for a worker; a traced int32 in a scheduled function.

    Raises:
        RuntimeError: called anywhere else.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/coordinator/experimental_get_current_worker_index
    """
    worker, _ = _current.get()
    if worker is None:
        raise ContextError(
            "experimental_get_current_worker_index was called where there is no worker. Call it in a "
            "scheduled function, or in one that makes a per-worker dataset."
        )
    return worker


class PerWorkerValue:
    """One value for each worker: a scheduled function gets the value of the worker that runs it.

    Args:
        values: one pytree of arrays or numbers for each worker, all with equal structure, shapes and dtypes.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/coordinator/PerWorkerValue
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, (list, tuple)) or not values:
            raise ArgumentError(
                f"PerWorkerValue: values must be a non-empty list; got {values!r:.80}."
            )
        copied = lambda x: x.copy() if isinstance(x, np.ndarray) else x  # noqa: E731
        self._values = tuple(jax.tree.map(copied, value) for value in values)

    def of_worker(self, worker: int | None, workers: int, _: int) -> Any:
        """Returns the value of one worker; used by the coordinator."""
        if len(self._values) < workers:
            raise ArgumentError(
                f"A PerWorkerValue of {len(self._values)} values was used with {workers} workers. Give one "
                "value for each worker."
            )
        return self._values[worker or 0]


class PerWorkerDataset:
    """A dataset for each worker, created when the worker first reads it.

    ``ClusterCoordinator.create_per_worker_dataset`` returns it; ``iter`` returns an iterator to pass to
    scheduled functions, which take elements with ``next``.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._make)


class PerWorkerIterator:
    """An iterator for each worker, to be passed to ``schedule``."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._iterators: dict[int, Any] = {}
        self._first: list[Any] = []
        """Elements of worker 0 that functions were traced with."""
        self._peeked: deque[Any] = deque()
        """Those of them that it has not taken."""
        self._reading: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise UnsupportedError(
            "Iterating over an AsyncDistributedIterator is not supported right now. Take elements in a "
            "function that coordinator.schedule runs: next(iterator) there."
        )

    def of_worker(self, worker: int | None, _: int, count: int) -> tuple[Any, ...]:
        """Takes elements on a worker; without one it peeks at the first elements of worker 0."""
        with self._reading[worker or 0]:
            if worker is None:
                while len(self._first) < count:
                    self._first.append(self._next(0))
                    self._peeked.append(self._first[-1])
                return tuple(self._first[:count])
            peeked: Any = self._peeked if worker == 0 else ()
            # A list, since a generator cannot raise StopIteration.
            elements = [peeked.popleft() if peeked else self._next(worker) for _ in range(count)]
            return tuple(elements)

    def _next(self, worker: int) -> Any:
        with on_worker(worker):
            if worker not in self._iterators:
                dataset = self._make(worker)
                if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
                    raise ArgumentTypeError(
                        "create_per_worker_dataset: dataset must be an iterable, or a function without "
                        f"arguments that returns one; got {dataset!r:.80}."
                    )
                self._iterators[worker] = iter(dataset)
            try:
                element = next(self._iterators[worker])
            except StopIteration:
                raise EndOfDataError(
                    f"The dataset of worker {worker} has no more elements. Repeat it, or schedule no more "
                    "functions than there are elements."
                ) from None
        # A distributed dataset, as TensorFlow's tutorial makes for each worker, has PerReplica leaves.
        return jax.tree.map(_of_worker, element, is_leaf=lambda x: isinstance(x, PerReplica))


def _of_worker(leaf: Any) -> Any:
    # A copy, since sources may reuse their arrays for the next element.
    value = leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    values = leaf.values if isinstance(leaf, PerReplica) else (value,)
    if len(values) > 1:
        raise ArgumentError(
            f"create_per_worker_dataset: with workers_per_update={len(values)} the workers divide each "
            "batch. Pass elements of strategy.distribute_dataset(...) in args of coordinator.schedule."
        )
    return values[0]


class TracedIterator:
    """Replaces a per-worker iterator while a function is traced."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = elements
        self.taken = 0

    def __iter__(self) -> TracedIterator:
        return self

    def __next__(self) -> Any:
        self.taken += 1
        if self.taken > len(self._elements):
            raise MoreElementsError
        return self._elements[self.taken - 1]


class MoreElementsError(BaseException):
    """A function takes another number of elements than it was traced with; no user code may catch it."""
