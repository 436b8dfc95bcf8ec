"""``DistributedDataset`` and its iterator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from jax.sharding import Mesh

from distribute_jax._absent import getattr_with_hints
from distribute_jax._checks import refusing
from distribute_jax._context import is_between_steps
from distribute_jax._errors import ArgumentError, hide_frames, warn_user
from distribute_jax._mesh import is_local, num_replicas
from distribute_jax._messages import PyTree
from distribute_jax.data._agreement import EpochEnd
from distribute_jax.data._element import HostElement
from distribute_jax.data._feed import Feed, State
from distribute_jax.data._prefetch import InputStallMonitor, Prefetcher
from distribute_jax.data._split import EpochProgress
from distribute_jax.processes import calling

Observer: TypeAlias = Callable[[PyTree], Any]
"""Computes something from a batch while it is on the host."""

_PlacedElement: TypeAlias = tuple[HostElement, PyTree, list[Any]]
"""An element on the host, the same on the devices, and what the observers returned for it."""


class Loop(Protocol):
    """A training loop that is notified of the batches that an iterator yields."""

    def between_steps(self) -> None:
        """Called before a batch is taken, when the steps of all earlier batches have run."""

    def took_batch(self) -> None:
        """Called after a batch was taken."""


class DistributedDataset:
    """Batches that are divided among the replicas of a strategy.

    Iterating yields one element for each global batch, in order: the user's structure with a
    ``PerReplica`` at every leaf. Every example appears exactly once in an epoch under the policies
    ``mask`` and ``shrink``. Iterating again starts the next epoch. Strategies create it; user code
    calls ``strategy.distribute_dataset`` or ``strategy.distribute_datasets_from_function``.

    Args:
        feed: the elements on the host.
        mesh: the strategy's mesh.
        guard: called when iteration starts and before each batch; raises if neither is allowed.
        ends: called for each pass; makes the processes end it together.
        ahead: how many elements a background thread may have ready on the devices; 0 for no thread.

    Example:
        >>> import distribute_jax as dj, numpy as np
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> for x in strategy.distribute_dataset([np.arange(4.0), np.arange(4.0)]):
        ...     print(float(strategy.reduce("sum", x, axis=0)))
        6.0
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.DistributedDataset")
        __getitem__ = refusing(
            "A distributed dataset yields batches in order: write `for batch in dataset:`, or "
            "next(iter(dataset)) for the first."
        )
        __reduce__ = refusing(
            "A distributed dataset refers to devices of its process, so it cannot be pickled. Send its "
            "source, and call strategy.distribute_dataset(source) where the batches are used."
        )

    def __init__(
        self,
        feed: Feed,
        *,
        mesh: Mesh,
        guard: Callable[[], None] = lambda: None,
        ends: EpochEnd = lambda elements, length: elements,
        ahead: int = 0,
    ) -> None:
        self._feed = feed
        self._mesh = mesh
        self._guard = guard
        self._ends = ends
        self._ahead = ahead
        self._stalls = InputStallMonitor()
        self._epoch = 0
        self._spec: PyTree = None
        self._warned = False

    def __iter__(self) -> DistributedIterator:
        """Starts the next epoch from its first batch."""
        self._guard()
        self._epoch += 1
        return DistributedIterator(self, self._epoch - 1, self._feed.open(self._epoch - 1))

    @property
    def element_spec(self) -> PyTree:
        """A ``jax.ShapeDtypeStruct`` for each leaf: one replica's share, padding included.

        It is read from the first batch, which is not consumed.
        """
        if self._spec is None:
            first = next(self._feed.preview(), None)
            if first is None:
                raise ArgumentError(
                    "element_spec is read from the first batch, but the dataset has no batch with "
                    "examples. Check the source given to strategy.distribute_dataset."
                )
            self._spec = first.spec
        return self._spec

    @property
    def cardinality(self) -> int | None:
        """The number of elements, or None if it is not known before the end.

        It follows from the length of the source. Functions, generators and endless sources have none,
        and it is not known in advance which batches ``partial="drop"`` will skip.
        """
        return self._feed.cardinality

    def __len__(self) -> int:
        """Returns ``cardinality``; raises a TypeError if it is None."""
        if self.cardinality is None:
            raise TypeError(
                "The length of this dataset is not known before its end, because its source has no length. "
                "Count in the loop, or pass a source that has a length."
            )
        return self.cardinality

    def __bool__(self) -> bool:
        return True

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds over the elements of one epoch: ``state = reduce_func(state, element)`` for each.

        Args:
            initial_state: the first state, and the result for a dataset without elements.
            reduce_func: takes the state and an element, returns the next state.

        Returns:
            The state after the last element.

        Raises:
            ArgumentError: the dataset is repeated without end.
            TypeError: ``reduce_func`` does not take two arguments.

        Source: https://www.tensorflow.org/api_docs/python/tf/data/Dataset#reduce
        """
        if self._feed.is_infinite:
            raise ArgumentError(
                "dataset.reduce folds over a whole epoch, and this source is repeated without end. "
                "Give its repeat a number, or loop over the dataset and break."
            )
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def _placed(
        self, elements: Iterator[HostElement], observers: list[Observer], done: int = 0
    ) -> Iterator[_PlacedElement]:
        length = self._feed.cardinality
        agreed = self._ends(elements, None if length is None else length - done)
        placed = (
            # Loaders reuse their buffers, so a batch is observed before the next one is read.
            (
                element,
                element.placed(self._mesh),
                [observer(element.batch) for observer in observers],
            )
            for element in agreed
        )
        if self._ahead == 0:
            return placed
        self._stalls.restart()
        can_change_thread = self._feed.can_change_thread
        return Prefetcher(placed, self._ahead, self._stalls, can_change_thread=can_change_thread)

    def _note_first(self, element: HostElement) -> None:
        if self._spec is None:
            self._spec = element.spec
        n, replicas = sum(element.counts), num_replicas(self._mesh)
        # In a job of several processes, each sees only its part of the batch.
        is_global = self._feed.divides and is_local(self._mesh)
        is_only = self._feed.cardinality == 1  # there are no more examples to batch with these
        if is_global and not is_only and not self._warned and 0 < n < replicas:
            self._warned = True
            warn_user(
                f"The global batch has {n} examples for {replicas} replicas, of which some get only padding. "
                f"Batch with at least {replicas}, the examples of all replicas, or use fewer devices."
            )


class DistributedIterator(Iterator[Any]):
    """One pass over a distributed dataset.

    An exception from the source passes through unchanged, and the dataset can be iterated again.
    :meth:`state` returns the position in the pass, and :meth:`restore` resumes from there, with any
    number of replicas.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedIterator
    """

    def __init__(
        self, dataset: DistributedDataset, epoch: int, elements: Iterator[HostElement]
    ) -> None:
        self._dataset = dataset
        self._epoch = epoch
        self._observers: list[Observer] = []
        self._observed: list[Any] = []
        self._elements = dataset._placed(elements, self._observers)
        self._progress = EpochProgress()
        self._is_first = True
        self._loop: Loop | None = None
        self._lock = threading.RLock()
        """Held while a batch is taken: several threads may iterate, and all see the end."""

    def __next__(self) -> PyTree:
        """The next element; StopIteration at the end."""
        try:
            element = self._take()
        except BaseException as error:
            hide_frames(error)
            raise
        if not element:
            raise StopIteration
        return element[0]

    get_next = __next__

    def get_next_as_optional(self) -> OptionalElement:
        """The next element; at the end an empty optional, without a StopIteration."""
        return OptionalElement(*self._take())

    @property
    def element_spec(self) -> PyTree:
        """One replica's share of each leaf, as ``DistributedDataset.element_spec``."""
        return self._dataset.element_spec

    def state(self) -> dict[str, Any]:
        """Returns the position in the pass, to be saved with the model after any step.

        Returns:
            A small dict of strings, numbers and Nones, for ``json`` or a checkpoint.

        Raises:
            ArgumentError: the source cannot start in the middle of an epoch.

        Example:
            >>> import distribute_jax as dj, numpy as np
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> dataset = strategy.distribute_dataset(dj.data.from_arrays(np.arange(6.0)).batch(2))
            >>> iterator = iter(dataset)
            >>> _ = next(iterator)
            >>> saved = iterator.state()
            >>> again = iter(dataset)
            >>> again.restore(saved)
            >>> strategy.experimental_local_results(next(again))[0].tolist()
            [2.0, 3.0]
        """
        return dict(self._dataset._feed.state(self._epoch, self._progress))

    def restore(self, state: State) -> None:
        """Continues from the position of another pass: with its next batch, and then with its next epoch.

        The strategy may have another number of replicas. The examples, the global batch size and
        the seed must be those of the saved pass.

        Args:
            state: what ``state()`` returned.

        Raises:
            ArgumentError: this is not a state, or one of another source; or the source cannot start in
                the middle of an epoch.
        """
        dataset = self._dataset
        dataset._guard()
        epoch, progress, elements = dataset._feed.resume(state)
        self._epoch, self._progress = epoch, progress
        self._elements = dataset._placed(elements, self._observers, progress.batches)
        # The first element from here on may be partial, and does not show the batch size.
        self._is_first = progress.batches == 0
        dataset._epoch = epoch + 1

    def _take(self) -> tuple[PyTree, ...]:
        """Returns a tuple of the next element, or an empty one at the end."""
        self._dataset._guard()
        with self._lock:
            if self._loop is not None and is_between_steps():
                self._loop.between_steps()
            entry = calling(next, self._elements, None, phase="waiting for the next batch")
            if entry is None:
                return ()
            element, placed, self._observed = entry
            if self._is_first:
                self._is_first = False
                self._dataset._note_first(element)
            self._progress = element.progress
            if self._loop is not None:
                self._loop.took_batch()
            return (placed,)


def watch(iterator: DistributedIterator, loop: Loop | None) -> None:
    """Makes a loop the one that is notified of every batch taken from now on; None for no loop."""
    iterator._loop = loop


def observe(iterator: DistributedIterator, observer: Observer) -> None:
    """Calls a function with every batch that is read from now on, while it is on the host."""
    iterator._observers[:] = [observer]


def observed(iterator: DistributedIterator) -> Any:
    """Returns what the observer returned for the latest batch; None without one."""
    return next(iter(iterator._observed), None)


def position(iterator: DistributedIterator) -> tuple[int, EpochProgress]:
    """Returns the position in the data, of which ``state`` tells."""
    return iterator._epoch, iterator._progress


@contextmanager
def at_position(
    iterator: DistributedIterator, earlier: tuple[int, EpochProgress]
) -> Iterator[None]:
    """Makes ``state`` tell of an earlier position within the block."""
    now = position(iterator)
    iterator._epoch, iterator._progress = earlier
    try:
        yield
    finally:
        iterator._epoch, iterator._progress = now


def is_infinite(dataset: DistributedDataset) -> bool:
    return dataset._feed.is_infinite


def batch_layout(dataset: DistributedDataset) -> str:
    """Returns the replicas and processes on which the contents of a batch depend; empty if on neither."""
    if dataset._feed.divides and not dataset._feed.cuts_batches:
        return ""
    processes = {device.process_index for device in dataset._mesh.devices.flat}
    return f"{num_replicas(dataset._mesh)} replicas in {len(processes)} processes"


def set_epoch(dataset: DistributedDataset, epoch: int) -> None:
    """Sets the epoch of the next pass, from which its shuffling follows."""
    dataset._epoch = epoch


class OptionalElement:
    """What ``get_next_as_optional`` returns: an element, or nothing at the end of the data.

    Source: https://www.tensorflow.org/api_docs/python/tf/experimental/Optional
    """

    def __init__(self, *element: PyTree) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Returns True if there is an element."""
        return bool(self._element)

    def get_value(self) -> PyTree:
        """Returns the element; raises an ArgumentError if there is none."""
        if not self._element:
            raise ArgumentError(
                "get_value() was called on an optional element without a value: the dataset has ended. "
                "Call has_value() first."
            )
        return self._element[0]
