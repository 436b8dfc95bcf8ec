"""Checks batches: that they can be divided, and that shapes and dtypes stay the same in an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import (
    KeyPath,
    PyTree,
    error_text,
    is_array,
    is_donated,
    leaf_text,
    listed,
    path_text,
)
from distribute_jax._values import DistributedValues

UNBATCHED = "Every leaf of a batch is an array whose dim 0 counts the examples."
NOT_NUMERIC = (
    "Devices hold bools, integers, floats and complex numbers. Encode strings as integers and turn "
    "lists into padded arrays, or leave these leaves out of the batch."
)
NOT_ARRAYS = (
    "A leaf must be a NumPy or JAX array. Convert it with np.asarray, and make a class of your own "
    "a container with jax.tree_util.register_dataclass."
)
DISTRIBUTED = (
    "These leaves are distributed already. Give distribute_dataset the batches as they come from "
    "the host, or pass the distributed ones straight to strategy.run."
)
RAGGED = (
    "All leaves of a batch must have the same number of examples in dim 0. A value that belongs to "
    "the whole batch is repeated for each example, or passed to strategy.run as an argument of its "
    "own."
)
MASKED = (
    "Devices know no masks, so the masked values would be taken for data. Give the values and the mask "
    "as two leaves: array.filled(0) and np.ma.getmaskarray(array)."
)
GIVEN_AWAY = (
    "A step has taken the memory of these arrays (donate_args, or they were state), so they can no longer "
    "be read. Keep data on the host as NumPy arrays, or copy it before: dj.snapshot(batch)."
)
TOO_LARGE = (
    "64-bit integers become 32-bit, because jax_enable_x64 is off, and these do not fit. Call "
    "jax.config.update('jax_enable_x64', True) first, or re-number them."
)


def check_batch(batch: PyTree, where: str, remedy: str) -> int:
    """Checks one global batch and gives its number of examples.

    Args:
        batch: a tree of NumPy or JAX arrays (global view).
        where: which batch it is, for the messages.
        remedy: how its source is batched, for the messages.

    Raises:
        ArgumentError: names every leaf that is no numeric array, has no dim 0, has another length
            than the others, or has integers that do not fit.
    """
    rows = _plain_rows(batch)
    if rows is not None:
        return rows
    leaves = _leaves(batch, where)
    if not leaves:
        raise ArgumentError(
            f"{where} is {batch!r:.60}, which holds no array, so it has no examples to divide. "
            f"{UNBATCHED} {remedy}"
        )
    faults: dict[str, list[str]] = {}
    for path, leaf in leaves:
        rule = next((rule for wrong, rule in _FAULTS if wrong(leaf)), None)
        if rule is not None:
            advice = f"{rule} {remedy}" if rule == UNBATCHED else rule
            faults.setdefault(advice, []).append(_line(path, leaf))
    sizes = set() if faults else {int(leaf.shape[0]) for _, leaf in leaves}
    if len(sizes) == 1:
        return sizes.pop()
    faults = faults or {RAGGED: [_line(path, leaf) for path, leaf in leaves]}
    reasons = "\n".join(f"{listed(lines)}\n{rule}" for rule, lines in faults.items())
    raise ArgumentError(f"{where} cannot be divided among the replicas:\n{reasons}")


_LONG = (np.dtype(np.longdouble), np.dtype(np.clongdouble))


def device_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Gives the dtype that a host array has on the devices: 32-bit for 64-bit unless x64 is on."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).newbyteorder("=")


def _plain_rows(batch: PyTree) -> int | None:
    """Gives the number of examples of a batch that is easily seen to be sound, as nearly all are."""
    try:
        leaves = jax.tree.leaves(batch, is_leaf=_is_distributed)
    except ValueError:
        return None
    sizes = {leaf.shape[0] if _is_plain(leaf) else None for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _is_plain(leaf: Any) -> bool:
    if type(leaf) is not np.ndarray or not leaf.ndim:
        return False
    kind, size = leaf.dtype.kind, leaf.dtype.itemsize
    return kind == "b" or (kind == "f" and size <= 8) or (kind in "iu" and size <= 4)


def _leaves(batch: PyTree, where: str) -> list[tuple[KeyPath, Any]]:
    try:
        return jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_distributed)
    except ValueError as error:
        raise ArgumentError(
            f"{where} is no tree that JAX can take apart: {error_text(error)} Give the keys of every dict "
            "one type, which can be sorted, such as str."
        ) from None


def _is_distributed(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues)


def _line(path: KeyPath, leaf: Any) -> str:
    return f"{path_text(path, 'batch')}: {leaf_text(leaf)}"


def _is_unbatched(leaf: Any) -> bool:
    if is_array(leaf):
        return bool(leaf.ndim == 0)
    return isinstance(leaf, (bool, int, float, complex))


def _is_not_numeric(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray):
        return isinstance(leaf, (str, bytes))
    dtype = leaf.dtype
    # NumPy takes a timedelta64 for a signed integer.
    numeric = (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_) and dtype.kind != "m"
    unheld = dtype.name.startswith("float6_") or dtype in _LONG
    return not numeric or unheld


def _is_too_large(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or not leaf.size:
        return False
    target = device_dtype(leaf.dtype)
    if target.itemsize >= leaf.dtype.itemsize:
        return False
    limits = np.iinfo(target)
    return bool(leaf.min() < limits.min or leaf.max() > limits.max)


_FAULTS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_is_distributed, DISTRIBUTED),
    (is_donated, GIVEN_AWAY),
    (lambda leaf: isinstance(leaf, np.ma.MaskedArray), MASKED),
    (_is_not_numeric, NOT_NUMERIC),
    (_is_unbatched, UNBATCHED),
    (lambda leaf: not is_array(leaf), NOT_ARRAYS),
    (_is_too_large, TOO_LARGE),
)


_ANOTHER_STRUCTURE = (
    "One step takes all batches, so every batch must have the same keys and nesting. Fill in what is "
    "missing, or distribute the two kinds as two datasets."
)
_ANOTHER_KIND = (
    "One step takes all batches, so a leaf keeps its dtype and its number of dims. Convert the batches "
    "to one of the two, for example with astype or reshape."
)


class Alike:
    """Compares the checked batches of one epoch with the first of them.

    The sizes of the dims may differ, as where sentences are padded batch by batch: the step is then
    compiled for each.
    """

    def __init__(self) -> None:
        self._first: list[jax.ShapeDtypeStruct] = []
        self._structure: Any = None
        self._kinds: list[Any] = []

    def check(self, batch: PyTree, where: str) -> None:
        """Raises an ArgumentError where a batch has another structure, or a leaf another kind."""
        leaves, structure = jax.tree.flatten(batch)
        kinds = [_kind(leaf) for leaf in leaves]
        if self._structure is None:
            self._structure, self._kinds = structure, kinds
            self._first = [_described(leaf) for leaf in leaves]
        elif structure != self._structure:
            raise ArgumentError(
                f"{where} has another structure than the first one:\n  it is  {structure}\n"
                f"  first: {self._structure}\n{_ANOTHER_STRUCTURE}"
            )
        elif kinds != self._kinds:
            raise self._another_kind(batch, kinds, where)

    def _another_kind(self, batch: PyTree, kinds: list[Any], where: str) -> ArgumentError:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        compared = zip(leaves, kinds, self._first, self._kinds, strict=True)
        lines = [
            f"{path_text(path, 'batch')}: {leaf_text(_described(leaf))}, "
            f"in the first batch {leaf_text(before)}"
            for (path, leaf), kind, before, before_kind in compared
            if kind != before_kind
        ]
        return ArgumentError(
            f"{where} is of another kind than the first one:\n{listed(lines)}\n{_ANOTHER_KIND}"
        )


def _kind(leaf: Any) -> tuple[int, Any]:
    return leaf.ndim, leaf.dtype if isinstance(leaf, jax.Array) else device_dtype(leaf.dtype)


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, _kind(leaf)[1])
