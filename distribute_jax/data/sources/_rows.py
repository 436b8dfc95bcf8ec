"""Trees of arrays as tables: checked, taken apart into rows, and put together from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import is_array, is_key, leaf_text, listed, path_text
from distribute_jax._typing import PyTree


def check_rows(tree: PyTree, called: str) -> int:
    """Gives the number of rows that all arrays of a tree have.

    Raises:
        ArgumentError: names every leaf that has no rows, or all leaves where their lengths differ.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lines = [f"{path_text(path, 'arrays')}: {leaf_text(leaf)}" for path, leaf in leaves]
    bad = [line for line, (_, leaf) in zip(lines, leaves, strict=True) if not _has_rows(leaf)]
    if bad or not leaves:
        raise ArgumentError(
            f"{called} got no arrays with a dim 0:\n{listed(bad or [repr(tree)[:60]])}\nIt takes a NumPy "
            "or JAX array, or a nest of them, whose dim 0 counts the examples. Make lists of numbers "
            "arrays with np.asarray."
        )
    sizes = {int(leaf.shape[0]) for _, leaf in leaves}
    if len(sizes) > 1:
        raise ArgumentError(
            f"{called} got arrays of different length:\n{listed(lines)}\nDim 0 counts the examples, so "
            "it must be the same in every array."
        )
    if sizes == {0}:
        raise ArgumentError(
            f"{called} got arrays without any example:\n{listed(lines)}\nCheck how they were loaded."
        )
    return sizes.pop()


def taken(tree: PyTree, rows: slice | NDArray[np.intp]) -> PyTree:
    """Takes the same rows of every array."""
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def stacked(examples: Sequence[PyTree]) -> PyTree:
    """Puts examples of one structure together along a new dim 0.

    Raises:
        ArgumentError: their structures differ, or the shapes or dtypes of a leaf, which is named.
    """
    first: Any = jax.tree.structure(examples[0])
    for example in examples[1:]:
        if jax.tree.structure(example) != first:
            raise ArgumentError(
                "Two examples of one batch have different structures:\n"
                f"  {first}\n  {jax.tree.structure(example)}\nGive every example the same keys and "
                "nesting."
            )
    return jax.tree_util.tree_map_with_path(_stack, *examples)


def _has_rows(leaf: Any) -> bool:
    return is_array(leaf) and not is_key(leaf) and leaf.ndim > 0


def _stack(path: Any, *leaves: Any) -> NDArray[Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    odd = next(
        (a for a in arrays if (a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype)), None
    )
    if odd is not None and (odd.shape != arrays[0].shape or not _is_text(odd, arrays[0])):
        raise ArgumentError(
            f"Examples of one batch differ in {path_text(path, 'example')}: {leaf_text(arrays[0])} and "
            f"{leaf_text(odd)}. Pad or cut them to one shape and one dtype first, for example with map."
        )
    return np.stack(arrays)


def _is_text(*arrays: NDArray[Any]) -> bool:
    # The dtype of text tells its length. Batches refuse it later, with the name of the leaf.
    return all(array.dtype.kind in "US" for array in arrays)
