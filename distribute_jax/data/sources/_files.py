"""``FileDataset``: examples read from files; and helpers that ``ArrayDataset`` uses too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import KeyPath, PyTree, is_array, is_key, leaf_text, listed, path_text
from distribute_jax.data.sources._base import Source, on_host, unbatched

Path = str | os.PathLike[str]
SEED = "shuffle(seed)"


@dataclass(frozen=True, eq=False)
class FileDataset:
    """The examples of files, read one file after the other; created by ``dj.data.from_files``.

    Each method returns a new dataset. A file is opened when its examples are needed, and is never held in
    memory as a whole unless ``read`` does so. Iterating it outside a strategy yields epoch 0.
    """

    _paths: tuple[Path, ...]
    _read: Callable[[Any], Any]
    _size: int | None = None
    _drop_remainder: bool = False
    _seed: int | None = None
    _buffer_size: int = 1

    def shuffle(self, buffer_size: int | None = None, *, seed: int = 0) -> FileDataset:
        """Shuffles the files, and the examples within a buffer, in another order each epoch.

        Args:
            buffer_size: examples in memory from which the next one is drawn; 1 shuffles only the files.
                None means 1024.
            seed: an integer from 0 to 2**32 - 1. The same seed results in the same epochs.

        Raises:
            ArgumentError: an argument is out of range, or the dataset is batched already.
        """
        self._check_unbatched("shuffle")
        size = 1024 if buffer_size is None else check_int("shuffle(buffer_size)", buffer_size)
        return replace(self, _seed=check_int(SEED, seed, 0, 2**32), _buffer_size=size)

    def batch(self, size: int, drop_remainder: bool = False) -> FileDataset:
        """Stacks consecutive examples along a new dim 0, across file boundaries.

        Args:
            size: examples in a global batch.
            drop_remainder: whether a smaller last batch is left out. A strategy computes exact results
                for it, so this is seldom needed.

        Raises:
            ArgumentError: ``size`` is not a positive integer, or the dataset is batched already.
        """
        self._check_unbatched("batch")
        size = check_int("batch(size)", size)
        return replace(self, _size=size, _drop_remainder=drop_remainder)

    def __iter__(self) -> Iterator[PyTree]:
        """The batches of epoch 0, or the examples before ``batch``."""
        return self._batches(0)

    def _batches(self, epoch: int) -> Iterator[PyTree]:
        examples = self._examples(epoch)
        if self._size is None:
            yield from examples
            return
        while batch := list(islice(examples, self._size)):
            if len(batch) < self._size and self._drop_remainder:
                return
            yield stack_examples(batch)

    def _examples(self, epoch: int) -> Iterator[PyTree]:
        if self._seed is None:
            yield from self._in_order(range(len(self._paths)))
            return
        random = np.random.Generator(np.random.Philox(key=np.array([self._seed, epoch], np.uint64)))
        buffer: list[PyTree] = []
        for example in self._in_order(random.permutation(len(self._paths))):
            if len(buffer) < self._buffer_size:
                buffer.append(example)
                continue
            drawn = int(random.integers(self._buffer_size))
            yield buffer[drawn]
            buffer[drawn] = example
        yield from (buffer[i] for i in random.permutation(len(buffer)))

    def _in_order(self, numbers: Iterable[int]) -> Iterator[PyTree]:
        for number in numbers:
            path = self._paths[number]
            yield from _examples_of(self._read(path), path)

    def _check_unbatched(self, method: str) -> None:
        if self._size is not None:
            raise ArgumentError(
                f"{method}() was called on a dataset of files that is already batched. Call shuffle before "
                "batch, and batch only once."
            )


class FileSource(Source):
    """The batches of ``dj.data.from_files``; resumes by reading all earlier batches."""

    text = "dj.data.from_files(…)"
    can_resume = True

    def __init__(self, dataset: FileDataset, method: str) -> None:
        if dataset._size is None:
            raise unbatched(self.text, method)
        super().__init__(dataset, method)
        self.seed, self.batch_size = dataset._seed, dataset._size
        self.num_files = len(dataset._paths)

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        return islice(self._dataset._batches(epoch), position, None)

    def shard_files(self, count: int, index: int) -> FileSource:
        paths = self._dataset._paths[index::count]
        return FileSource(replace(self._dataset, _paths=paths), self._method)


def from_files(paths: Sequence[Path], read: Callable[[Any], Iterable[PyTree]]) -> FileDataset:
    """Creates a dataset of the examples in files.

    In a job of several processes each reads a part of the files, if there are enough of them.

    Args:
        paths: the files, in the order in which they are read. Sort a directory listing: its order may
            differ between machines.
        read: takes one path and returns its examples: an iterable or a generator of them, each a pytree of
            arrays or numbers; or an array, or a dict or tuple of arrays, whose rows are the examples.

    Returns:
        The dataset of single examples. Call ``shuffle`` on it if needed, then ``batch``, and pass it to
        ``strategy.distribute_dataset``.

    Raises:
        ArgumentError: ``paths`` is not a sequence of paths or is empty; later, ``read`` returns
            something that cannot be iterated.

    Example:
        >>> import distribute_jax as dj, numpy as np
        >>> files = {"a": np.arange(3), "b": np.arange(3, 5)}
        >>> dataset = dj.data.from_files(["a", "b"], read=files.__getitem__).batch(2)
        >>> [batch.tolist() for batch in dataset]
        [[0, 1], [2, 3], [4]]
    """
    is_list = isinstance(paths, Sequence) and not isinstance(paths, str)
    if not is_list or not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ArgumentError(
            "dj.data.from_files: paths must be a list of at least one str or pathlib.Path; got "
            f"{leaf_text(paths)}."
        )
    return FileDataset(tuple(paths), read)


def _examples_of(content: Any, path: Path) -> Iterator[PyTree]:
    content = on_host(content) if isinstance(content, (Mapping, tuple)) else content
    if is_array(content) or isinstance(content, (Mapping, tuple)):
        rows = check_rows(content, f"read({os.fspath(path)!r})")
        return (jax.tree.map(lambda leaf, i=i: leaf[i], content) for i in range(rows))
    if not hasattr(type(content), "__iter__"):
        raise ArgumentError(
            f"read({os.fspath(path)!r}) returned {leaf_text(content)}. It must return the examples of the "
            "file: an iterable or generator of them, or arrays with one row for each example."
        )
    return map(on_host, content)


def check_rows(tree: PyTree, method: str) -> int:
    """Returns the number of rows of all arrays of a tree, or raises an error that names the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lines = [f"{path_text(path, 'arrays')}: {leaf_text(leaf)}" for path, leaf in leaves]
    bad = [line for line, (_, leaf) in zip(lines, leaves, strict=True) if not _has_rows(leaf)]
    if bad or not leaves:
        raise ArgumentError(
            f"{method} got no arrays with a dim 0:\n{listed(bad or [repr(tree)[:60]])}\nIt takes a NumPy "
            "or JAX array, or a pytree of them, whose dim 0 counts the examples. Convert lists of numbers "
            "with np.asarray."
        )
    sizes = {int(leaf.shape[0]) for _, leaf in leaves}
    if len(sizes) > 1 or 0 in sizes:
        raise ArgumentError(
            f"{method} got arrays of different lengths, or without any example:\n{listed(lines)}\nDim 0 "
            "counts the examples, so it must be the same in every array, and not 0."
        )
    return sizes.pop()


def _has_rows(leaf: Any) -> bool:
    return is_array(leaf) and not is_key(leaf) and leaf.ndim > 0


def stack_examples(examples: Sequence[PyTree]) -> PyTree:
    """Stacks examples along a new dim 0, or raises if they differ in structure, shape or dtype."""
    first, *others = dict.fromkeys(map(jax.tree.structure, examples))
    if others:
        raise ArgumentError(
            f"Two examples of one batch have different structures:\n  {first}\n  {others[0]}\n"
            "Give every example the same keys and nesting."
        )
    return jax.tree_util.tree_map_with_path(_stack, *examples)


def _stack(path: KeyPath, *leaves: Any) -> NDArray[Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    # The dtype of a string depends on its length. Strings are refused later, with the name of the leaf.
    kinds = {(a.shape, a.dtype if a.dtype.kind not in "US" else "text"): a for a in arrays}
    if len(kinds) > 1:
        one, other, *_ = map(leaf_text, kinds.values())
        raise ArgumentError(
            f"Examples of one batch differ in {path_text(path, 'example')}: {one} and {other}. Convert "
            "them to one shape and one dtype first, for example with map."
        )
    return np.stack(arrays)


def apply_function(fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
    """Calls the function of a ``map``; raises if it returns None."""
    result = fn(value)
    if result is None:
        raise ArgumentError(
            f"The function {fn!r:.60} given to map returned None. It must return the new example or batch."
        )
    return result
