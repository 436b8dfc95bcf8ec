"""``ArrayDataset``: arrays in memory, shuffled, batched, repeated and mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from distribute_jax._absent import getattr_with_hints
from distribute_jax._checks import check_int, check_optional, takes
from distribute_jax._errors import ArgumentError, ArgumentTypeError
from distribute_jax._messages import PyTree, flatten, is_key
from distribute_jax.data.sources._base import Source, on_host, unbatched
from distribute_jax.data.sources._files import SEED, apply_function, check_rows, stack_examples


@dataclass(frozen=True, eq=False, repr=False)
class ArrayDataset:
    """Examples in memory, or batches of them; created by ``dj.data.from_arrays``.

    Each method returns a new dataset. The order depends only on the seed and the epoch, so it is the same
    on any number of devices, and training can resume at any batch. Iterating it outside a strategy yields
    epoch 0.

    Example:
        >>> import distribute_jax as dj, numpy as np
        >>> dataset = dj.data.from_arrays({"x": np.arange(5.0)}).map(lambda example: example["x"] / 2)
        >>> [batch.tolist() for batch in dataset.batch(3)]
        [[0.0, 0.5, 1.0], [1.5, 2.0]]
    """

    _tree: PyTree
    _order: Order
    """The order of the rows, before they are batched."""
    _functions: tuple[Callable[[PyTree], PyTree], ...] = ()
    """Applied to each example, in this order."""
    _size: int = 0
    """The batch size."""
    _batches: Order | None = None
    """The order of the batches; None before ``batch``."""
    _batch_functions: tuple[Callable[[PyTree], PyTree], ...] = ()
    _seed: int | None = None

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.data.ArrayDataset")

    def shuffle(self, buffer_size: int | None = None, *, seed: int = 0) -> ArrayDataset:
        """Shuffles all examples, in another order each epoch; after ``batch``, the batches.

        Args:
            buffer_size: accepted as by ``tf.data``, without effect: everything is in memory, so everything
                is shuffled.
            seed: an integer from 0 to 2**32 - 1. The same seed results in the same epochs.

        Raises:
            ArgumentError: an argument is out of range, or batches without end would be shuffled.
        """
        check_optional(check_int, "shuffle(buffer_size)", buffer_size)
        seed = check_int(SEED, seed, 0, 2**32)
        if self._batches is None:
            return replace(self, _order=replace(self._order, seed=seed), _seed=seed)
        if self._order.is_endless:
            raise ArgumentError(
                "shuffle() was called after repeat() without end and batch(). Shuffle first."
            )
        return replace(self, _batches=replace(self._batches, seed=seed), _seed=seed)

    def batch(self, size: int, drop_remainder: bool = False) -> ArrayDataset:
        """Stacks consecutive examples along a new dim 0.

        Args:
            size: examples in a global batch.
            drop_remainder: whether a smaller last batch is left out. A strategy computes exact results
                for it, so this is seldom needed.

        Raises:
            ArgumentError: ``size`` is not a positive integer, no batch would be left, or the dataset is
                already batched.
        """
        size = check_int("batch(size)", size)
        if self._batches is not None:
            raise ArgumentError(
                "batch() was called on a dataset that is already batched. Leave one of the two out: "
                "strategy.distribute_dataset itself divides each batch among the replicas."
            )
        length = self._order.length
        count = length // size if drop_remainder else -(-length // size)
        if not count:
            raise ArgumentError(
                f"batch(size={size}, drop_remainder=True) would leave no batch of {length} examples. "
                "Choose a smaller size, or leave drop_remainder out."
            )
        return replace(self, _size=size, _batches=Order(count))

    def repeat(self, n: int | None = None) -> ArrayDataset:
        """Makes one epoch of n passes, each in another order if shuffled; without n, an epoch has no end.

        If called before ``batch``, a batch may contain the end of one pass and the beginning of the next.

        Args:
            n: the number of passes; None for no end.

        Raises:
            ArgumentError: ``n`` is not a positive integer, or the dataset already has no end.
        """
        times = None if n is None else check_int("repeat(n)", n)
        if self._is_endless():
            raise ArgumentError(
                "repeat() was called on a dataset that is repeated without end. Leave one of the two out."
            )
        if self._batches is None:
            return replace(self, _order=self._order.repeated(times))
        return replace(self, _batches=self._batches.repeated(times))

    def map(self, fn: Callable[[PyTree], PyTree]) -> ArrayDataset:
        """Applies a function on the host: to each example, or after ``batch`` to each batch.

        Args:
            fn: takes one example (the arrays' rows, without dim 0) or one batch, and returns a tree of
                arrays or numbers. It must be deterministic, or a resumed run differs.

        Raises:
            ArgumentError: ``fn`` cannot be called with one argument; later, it returns None.
        """
        if not takes(fn, None):
            raise ArgumentError(
                f"map calls {fn!r:.60} with one argument, the example or batch as it is. If that is a "
                "tuple, write lambda example: … with example[0], or def f(example): x, y = example."
            )
        if self._batches is None:
            return replace(self, _functions=(*self._functions, fn))
        return replace(self, _batch_functions=(*self._batch_functions, fn))

    def __len__(self) -> int:
        """The number of batches of an epoch, or of examples before ``batch``."""
        if self._is_endless():
            raise TypeError("a dataset that is repeated without end has no length")
        return self._length()

    def __iter__(self) -> Iterator[PyTree]:
        """The batches of epoch 0, or the examples before ``batch``."""
        return self._read(0, 0)

    def _read(self, epoch: int, position: int) -> Iterator[PyTree]:
        read = self._example if self._batches is None else self._batch
        length = self._length()
        return (read(epoch * length + i) for i in range(position, length))

    def _length(self) -> int:
        return (self._batches or self._order).length

    def _is_endless(self) -> bool:
        return self._order.is_endless or (self._batches is not None and self._batches.is_endless)

    def _batch(self, position: int) -> PyTree:
        number, index = (self._batches or self._order).locate(position)
        start = number * self._order.length + index * self._size
        stop = min(start + self._size, (number + 1) * self._order.length)
        if self._functions:
            batch = stack_examples([self._example(row) for row in range(start, stop)])
        else:
            batch = self._rows(start, stop)
        for fn in self._batch_functions:
            batch = apply_function(fn, batch)
        return batch

    def _example(self, position: int) -> PyTree:
        example = jax.tree.map(lambda leaf: leaf[0], self._rows(position, position + 1))
        for fn in self._functions:
            example = apply_function(fn, example)
        return example

    def _rows(self, start: int, stop: int) -> PyTree:
        rows = self._order.take(start, stop)
        leaves, treedef = flatten(self._tree, None)
        return treedef.unflatten([leaf[rows] for leaf in leaves])


class ArraySource(Source):
    """The batches of ``dj.data.from_arrays``."""

    text = "dj.data.from_arrays(…)"
    batching = "A function of map after batch takes and returns whole batches."
    can_resume = True

    def __init__(self, dataset: ArrayDataset, method: str) -> None:
        if dataset._batches is None:
            raise unbatched(self.text, method)
        super().__init__(dataset, method)
        self.is_infinite = dataset._is_endless()
        self.seed = dataset._seed
        self.examples, self.batch_size = dataset._order.rows, dataset._size
        self.runs_user_code = bool(dataset._functions or dataset._batch_functions)

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        return self._dataset._read(epoch, position)


def from_arrays(tree: PyTree, *more: PyTree) -> ArrayDataset:
    """Creates a dataset of the rows of arrays in memory.

    Args:
        tree: a NumPy or JAX array, a tensor or table that NumPy can read, or a pytree of them (dicts, tuples,
            registered dataclasses; None stays None); dim 0 of each counts the examples. JAX arrays are
            copied to the host once.
        *more: refused; pass several arrays as one tuple.

    Returns:
        The dataset of single examples. Call ``batch`` on it, and ``shuffle``, ``map`` and ``repeat`` as
        needed, and pass it to ``strategy.distribute_dataset``.

    Raises:
        ArgumentError: a leaf is not an array or has no dim 0, leaves have different lengths, or there are
            no examples; the message names the leaves.

    Example:
        >>> import distribute_jax as dj, numpy as np
        >>> x, y = np.arange(8.0), np.arange(8) % 2
        >>> dataset = dj.data.from_arrays((x, y)).shuffle(seed=0).batch(4)
        >>> len(dataset)
        2
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> sum(float(strategy.reduce("sum", x, axis=0)) for x, y in strategy.distribute_dataset(dataset))
        28.0

    Source: https://www.tensorflow.org/api_docs/python/tf/data/Dataset#from_tensor_slices
    """
    if more:
        raise ArgumentTypeError(
            "dj.data.from_arrays takes one pytree of arrays: dj.data.from_arrays((x, y))."
        )
    tree = jax.tree.map(_array, on_host(tree, "arrays"))
    return ArrayDataset(tree, Order(check_rows(tree, "dj.data.from_arrays")))


def _array(leaf: Any) -> Any:
    """Converts a JAX array, or a table or series of pandas, to a NumPy array."""
    is_known = isinstance(leaf, np.ndarray) or is_key(leaf) or not hasattr(leaf, "shape")
    return leaf if is_known or not hasattr(leaf, "__array__") else np.asarray(leaf)


_ENDLESS = 2**62
"""The length of an epoch without end: more than anyone reads, and still a valid index."""


@dataclass(frozen=True)
class Order:
    """The order of rows, or of batches, in which each pass over them is shuffled differently.

    Positions count through all passes and epochs.
    """

    rows: int
    """The number of rows or batches; at least one."""
    seed: int | None = None
    """None for no shuffling."""
    passes: int = 1
    """Passes over the rows in one epoch."""
    _cached: dict[int, NDArray[Any]] = field(default_factory=dict, init=False)
    """The permutation of the latest pass, by the number of the pass."""

    @property
    def length(self) -> int:
        """The number of positions in one epoch."""
        return self.rows * self.passes

    @property
    def is_endless(self) -> bool:
        return self.length >= _ENDLESS

    def repeated(self, times: int | None) -> Order:
        """Returns the order with each epoch repeated; None for no end."""
        passes = -(-_ENDLESS // self.rows) if times is None else self.passes * times
        return replace(self, passes=passes)

    def locate(self, position: int) -> tuple[int, int]:
        """Returns the number of the pass and the row at a position."""
        number, index = divmod(position, self.rows)
        return number, index if self.seed is None else int(self._permutation(number)[index])

    def take(self, start: int, stop: int) -> slice | NDArray[Any]:
        """Returns the rows at positions start to stop - 1: a slice, which copies nothing, if consecutive."""
        first, last = start // self.rows, (stop - 1) // self.rows
        if first == last and self.seed is None:
            return slice(start - first * self.rows, stop - first * self.rows)
        parts = []
        for number in range(first, last + 1):
            begin = number * self.rows
            parts.append(self._permutation(number)[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)

    def _permutation(self, number: int) -> NDArray[Any]:
        """Returns the rows of one pass in order."""
        if self.seed is None:
            return np.arange(self.rows)
        permutation = self._cached.get(number)
        if permutation is None:
            # Not Generator.permutation: NumPy promises only for raw random numbers that they stay the
            # same in later versions, and a run may be resumed under another one.
            key = np.array([self.seed, number], np.uint64)
            permutation = np.argsort(np.random.Philox(key=key).random_raw(self.rows), kind="stable")
            self._cached.clear()
            self._cached[number] = permutation
        return permutation
