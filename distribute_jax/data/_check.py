"""Checks that a batch can be divided, and that all batches of an epoch fit one step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import (
    MASKED,
    KeyPath,
    PyTree,
    check_int_range,
    devices_hold,
    error_text,
    flatten,
    is_array,
    is_donated,
    leaf_text,
    listed,
    path_text,
)
from distribute_jax._values import DistributedValues

UNBATCHED = "Every leaf of a batch is an array whose dim 0 counts the examples."
NOT_NUMERIC = (
    "Devices hold bools, integers, floats of at most 64 bits and complex numbers. Encode strings as integers "
    "and turn lists into padded arrays, or leave these leaves out of the batch."
)
NOT_ARRAYS = (
    "A leaf must be a NumPy or JAX array. Convert it with np.asarray, or register its class with "
    "jax.tree_util.register_dataclass."
)
DISTRIBUTED = (
    "These leaves are distributed already. Give distribute_dataset the batches as they come from "
    "the host, or pass the distributed ones straight to strategy.run."
)
RAGGED = (
    "All leaves of a batch must have the same number of examples in dim 0. Repeat a value that belongs "
    "to the whole batch for each example, or pass it to strategy.run as a separate argument."
)
DONATED = (
    "These arrays were donated, to a jax.jit or with donate_args, so they can no longer be read. Keep "
    "data on the host as NumPy arrays, or copy it before: dj.snapshot(batch)."
)
TOO_LARGE = (
    "64-bit integers become 32-bit, because jax_enable_x64 is off, and these do not fit. Call "
    "jax.config.update('jax_enable_x64', True) first, or renumber them."
)


def check_batch(batch: PyTree, where: str, remedy: str) -> int:
    """Returns the number of examples of a batch, or raises an ArgumentError that names every bad leaf.

    Messages begin with ``where``, the number of the batch, and ``remedy`` says how to batch its source.
    """
    try:
        leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_distributed)
    except ValueError as error:
        raise ArgumentError(
            f"{where} is not a tree that JAX can flatten: {error_text(error)} Give the keys of every dict "
            "one type, which can be sorted, such as str."
        ) from None
    if not leaves:
        raise ArgumentError(
            f"{where} is {batch!r:.60}, which contains no array, so it has no examples to divide. "
            f"{UNBATCHED} {remedy}"
        )
    faults: dict[str, list[str]] = {}
    for path, leaf in leaves:
        rule = next((rule for is_fault, rule in _FAULTS if is_fault(leaf)), None)
        if rule is not None:
            advice = f"{rule} {remedy}" if rule == UNBATCHED else rule
            faults.setdefault(advice, []).append(_line(path, leaf))
    lengths = set() if faults else {int(leaf.shape[0]) for _, leaf in leaves}
    if len(lengths) == 1:
        return lengths.pop()
    if not faults:
        faults = {f"{RAGGED} Or: {remedy}": [_line(path, leaf) for path, leaf in leaves]}
    reasons = "\n".join(f"{listed(lines)}\n{rule}" for rule, lines in faults.items())
    raise ArgumentError(f"{where} cannot be divided among the replicas:\n{reasons}")


_SAME_ON_DEVICES = frozenset(
    map(
        np.dtype,
        ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32"),
    )
)


def device_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype that a host array gets on the devices: 32-bit for 64-bit unless x64 is on."""
    if dtype in _SAME_ON_DEVICES:
        return dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).newbyteorder("=")


def dtype_on_device(leaf: Any) -> np.dtype[Any]:
    """Returns the dtype that a leaf has, or will have, on the devices."""
    return leaf.dtype if isinstance(leaf, jax.Array) else device_dtype(leaf.dtype)


def _is_plain(leaf: Any) -> bool:
    """True for a NumPy array of a dtype that devices can hold, apart from integers that are too large."""
    return type(leaf) is np.ndarray and leaf.dtype.kind in "biuf" and leaf.itemsize <= 8


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
    return not devices_hold(leaf.dtype)


def _is_too_large(leaf: Any) -> bool:
    try:
        check_int_range(leaf, "A batch")
    except ArgumentError:
        return True
    return False


_FAULTS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_is_distributed, DISTRIBUTED),
    (is_donated, DONATED),
    (lambda leaf: isinstance(leaf, np.ma.MaskedArray), MASKED),
    (_is_not_numeric, NOT_NUMERIC),
    (_is_unbatched, UNBATCHED),
    (lambda leaf: not is_array(leaf), NOT_ARRAYS),
    (_is_too_large, TOO_LARGE),
)


class BatchSignature:
    """The structure, dtypes and numbers of dims that all batches of an epoch have.

    The sizes of the dims may differ, for example if sentences are padded batch by batch: the step is
    then compiled for each.
    """

    def __init__(self) -> None:
        self._structure: Any = None
        self._first: list[jax.ShapeDtypeStruct] = []
        self._plain: list[Any] = []
        """Dtype and number of dims of each leaf of the first batch, if devices can hold all such arrays."""
        self._wide: list[int] = []
        """The leaves whose values must be checked: integers of 64 bits."""

    def check(self, batch: PyTree, where: str, remedy: str, *, compare_empty: bool) -> int:
        """Returns the number of examples of a batch; raises as ``check_batch``, and for another signature.

        A batch without examples may have any signature unless ``compare_empty``.
        """
        rows = self._rows_of_same(batch)
        if rows is None:
            rows = check_batch(batch, where, remedy)
            if rows or compare_empty:
                self._compare(batch, where)
        return rows

    def _rows_of_same(self, batch: PyTree) -> int | None:
        """Returns the number of examples of a batch that needs no other check; None for any other batch.

        Nearly all batches are NumPy arrays that differ from those of the first one in their sizes only.
        """
        if not self._plain:
            return None
        try:
            leaves, structure = flatten(batch, None)
        except ValueError:  # keys that cannot be sorted
            return None
        same = structure == self._structure and _ARRAYS.issuperset(map(type, leaves))
        if not same or list(map(_dtype_and_ndim, leaves)) != self._plain:
            return None
        if any(_is_too_large(leaves[i]) for i in self._wide):
            return None
        sizes = set(map(len, leaves))
        return sizes.pop() if len(sizes) == 1 else None

    def _compare(self, batch: PyTree, where: str) -> None:
        """Raises an ArgumentError if a checked batch differs from the first one."""
        leaves, structure = jax.tree.flatten(batch)
        specs = list(map(_spec, leaves))
        if self._structure is None:
            self._structure, self._first = structure, specs
            if all(map(_is_plain, leaves)):
                self._plain = list(map(_dtype_and_ndim, leaves))
                self._wide = [
                    i for i, x in enumerate(leaves) if x.dtype.kind in "iu" and x.itemsize == 8
                ]
        elif structure != self._structure:
            raise ArgumentError(
                f"{where} has another structure than the first batch:\n  it is  {structure}\n"
                f"  first: {self._structure}\nOne step takes all batches, so every batch must have the "
                "same keys and nesting. Fill in what is missing, or distribute two datasets."
            )
        elif list(map(_dtype_and_ndim, specs)) != list(map(_dtype_and_ndim, self._first)):
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
            lines = [
                f"{_line(path, spec)}, in the first batch {leaf_text(first)}"
                for path, spec, first in zip(paths, specs, self._first, strict=True)
                if _dtype_and_ndim(spec) != _dtype_and_ndim(first)
            ]
            raise ArgumentError(
                f"{where} differs from the first batch:\n{listed(lines)}\nOne step takes all batches, so "
                "a leaf keeps its dtype and its number of dims. Convert the batches to one of the two, for "
                "example with astype or reshape."
            )


_ARRAYS = frozenset({np.ndarray})
_dtype_and_ndim = operator.attrgetter("dtype", "ndim")


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype_on_device(leaf))
