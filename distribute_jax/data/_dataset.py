"""The dataset that a strategy distributes, and its iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import num_replicas
from distribute_jax._typing import PyTree
from distribute_jax.data._assemble import assemble, spec
from distribute_jax.data._host import laid_out
from distribute_jax.data._optional import OptionalElement
from distribute_jax.data._options import InputOptions, PartialPolicy
from distribute_jax.data._partial import warn_of_idle_replicas
from distribute_jax.data._source import find_source
from distribute_jax.data._split import Division


class DistributedDataset:
    """Global batches, each spread over the replicas of a strategy.

    Iterating gives one element for each batch, in order: the user's structure with a ``PerReplica``
    at every leaf, cut into consecutive shares as TensorFlow cuts it. Every example appears exactly
    once in an epoch under the policies ``mask`` and ``shrink``. Iterating again starts anew.
    Strategies make it; user code calls ``strategy.distribute_dataset``.

    Args:
        source: an iterable of global batches (trees of NumPy or JAX arrays with the examples along
            dim 0), or a function without arguments that returns one.
        mesh: the strategy's mesh.
        options: what becomes of partial batches.
        guard: called when iteration starts and before each batch; it raises where neither is
            allowed.

    Raises:
        ArgumentError: the source cannot be iterated; later, a batch cannot be divided, or a
            one-shot iterator is started a second time.

    Example:
        >>> import distribute_jax as dj, numpy as np
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> for x in strategy.distribute_dataset([np.arange(4.0), np.arange(4.0)]):
        ...     print(float(strategy.reduce("sum", x, axis=0)))
        6.0
        6.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    __module__ = "distribute_jax"

    def __init__(
        self,
        source: Any,
        *,
        mesh: Mesh,
        options: InputOptions | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = find_source(source)
        self._mesh = mesh
        self._policy = PartialPolicy((options or InputOptions()).partial)
        self._guard = guard
        self._warned = False
        self._spec: PyTree = None

    def __iter__(self) -> DistributedIterator:
        """Starts the batches from the first one."""
        self._guard()
        return DistributedIterator(self, self._laid_out(self._source.open()))

    @property
    def element_spec(self) -> PyTree:
        """A ``jax.ShapeDtypeStruct`` for each leaf: one replica's share, padding included.

        It is read from the first batch, which is not used up.
        """
        if self._spec is None:
            first = next(self._laid_out(self._source.preview()), None)
            if first is None:
                raise ArgumentError(
                    "element_spec is read from the first batch, but the dataset has no batch with "
                    "examples. Check the source given to strategy.distribute_dataset."
                )
            self._spec = spec(*first)
        return self._spec

    @property
    def cardinality(self) -> int | None:
        """The number of elements, or None where it is not known before the end.

        It is the source's own length, so functions and generators have none; nor is it known which
        batches ``partial="drop"`` will skip.
        """
        if self._policy is PartialPolicy.DROP:
            return None
        try:
            return len(self._source)
        except TypeError:
            return None

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds over the elements of one epoch: ``state = reduce_func(state, element)`` for each.

        Args:
            initial_state: what the first call gets, and the result for a dataset without elements.
            reduce_func: takes the state and an element, gives the next state.

        Source: https://www.tensorflow.org/api_docs/python/tf/data/Dataset#reduce
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def _laid_out(self, batches: Iterator[PyTree]) -> Iterator[tuple[PyTree, Division]]:
        return laid_out(batches, self._policy, num_replicas(self._mesh))

    def _note_first(self, batch: PyTree, division: Division) -> None:
        if self._spec is None:
            self._spec = spec(batch, division)
        n = sum(division.counts or ())
        if not self._warned and 0 < n < num_replicas(self._mesh):
            self._warned = True
            # The user's line called __next__, which called _take, which called this.
            warn_of_idle_replicas(n, num_replicas(self._mesh), stacklevel=4)


class DistributedIterator(Iterator[Any]):
    """One pass over a distributed dataset.

    An exception from the source passes through unchanged, and the dataset can be iterated anew.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedIterator
    """

    __module__ = "distribute_jax"

    def __init__(
        self, dataset: DistributedDataset, batches: Iterator[tuple[PyTree, Division]]
    ) -> None:
        self._dataset = dataset
        self._batches = batches
        self._is_first = True

    def __next__(self) -> PyTree:
        """The next element; StopIteration at the end."""
        found = self._take()
        if found is None:
            raise StopIteration
        return found[0]

    get_next = __next__

    def get_next_as_optional(self) -> OptionalElement:
        """The next element if there is one; at the end, an empty one, and no StopIteration."""
        found = self._take()
        return OptionalElement(*found) if found else OptionalElement()

    @property
    def element_spec(self) -> PyTree:
        """See ``DistributedDataset.element_spec``."""
        return self._dataset.element_spec

    def _take(self) -> tuple[PyTree] | None:
        self._dataset._guard()
        laid = next(self._batches, None)
        if laid is None:
            return None
        if self._is_first:
            self._is_first = False
            self._dataset._note_first(*laid)
        return (assemble(*laid, self._dataset._mesh),)
