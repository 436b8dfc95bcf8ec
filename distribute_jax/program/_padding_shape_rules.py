"""Rules of the padding proof for elementwise operations and for operations on shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from distribute_jax.program._padding_marks import (
    ANY,
    FINITE,
    PURE,
    Mark,
    Pad,
    Pair,
    Rows,
    Rule,
    Shape,
    UndecidedError,
    aligned_rows,
    elementwise_pad,
    evaluate,
    join_pads,
    known_pad,
    operand_pad,
)


def in_place(
    pair: Pair,
    marks: Sequence[Mark],
    pad: Callable[[list[Pad]], Pad] = join_pads,
    *,
    everywhere: bool = True,
    output: int = 0,
) -> tuple[Rows, ...]:
    """Returns the rows of an output whose entries are computed from those at the same index."""
    return tuple(
        aligned_rows(dim, [(mark, mark.at(dim)) for mark in marks], pad, everywhere=everywhere)
        for dim in pair.varying(output)
    )


def _uniform(dims: Iterable[int], pad: Pad) -> tuple[Rows, ...]:
    return tuple(Rows(dim, 0, 0, pad, data=False) for dim in dims)


def _constant_rows(pair: Pair, number: Any) -> tuple[Rows, ...]:
    return _uniform(pair.varying(), known_pad(number, is_pure=True))


# Elementwise operations


def elementwise(pair: Pair, marks: list[Mark]) -> Mark:
    """Each entry is computed from those at the same index, and from scalars."""
    first, consts = marks[0], [mark.const for mark in marks]
    const = None if any(c is None for c in consts) else evaluate(pair.name, consts, pair)
    if pair.name in ("lt", "ge") and first.index is not None and consts[1] == 0:
        const = pair.name == "ge"
    is_cast = pair.name == "convert_element_type"
    index, column = (first.index, first.column) if is_cast else (None, None)
    if const is not None:
        return Mark(_constant_rows(pair, const), const, index, column)
    pad = functools.partial(elementwise_pad, pair.name, pair=pair)
    return Mark(in_place(pair, marks, pad, everywhere=False), None, index, column)


def select(pair: Pair, marks: list[Mark]) -> Mark:
    """``select_n``: a mask of rows decides which case is in the padding."""
    which, *cases = marks
    if which.const is not None and int(which.const) < len(cases):
        return cases[int(which.const)]
    return Mark(in_place(pair, marks, selected_pad, everywhere=False))


def selected_pad(pads: Sequence[Pad]) -> Pad:
    """Returns the padding after ``select_n``."""
    decided, *values = pads
    if decided.number is None or decided.is_pure:
        pad = join_pads(values)
        return pad._replace(is_pure=pad.is_pure and decided.is_pure)
    # What is selected for padding only need not be what any real row has.
    number = values[int(decided.number)].number
    return ANY if number is None else known_pad(number)


# Operations on shapes


def broadcast(pair: Pair, marks: list[Mark]) -> Mark:
    """New dims are uniform."""
    mark, places = marks[0], [int(d) for d in pair.params["broadcast_dimensions"]]
    same = PURE if mark.const is None else known_pad(mark.const, is_pure=True)
    rows: list[Rows] = []
    for dim in pair.varying():
        old = mark.at(places.index(dim)) if dim in places else None
        rows += [replace(old, dim=dim)] if old else _uniform([dim], same)
    return Mark(tuple(rows), mark.const, None if mark.index is None else places[mark.index])


def reshape(pair: Pair, marks: list[Mark]) -> Mark:
    """Rows stay rows if they keep their stride."""
    if pair.params.get("dimensions") is not None:
        raise UndecidedError("transposed as well")
    [mark] = marks
    if mark.const is not None:
        return Mark(_constant_rows(pair, mark.const), mark.const)
    rows = [_reshaped(r, pair) for r in mark.rows]
    moved = zip(rows, mark.rows, strict=True)
    index = next((n.dim for n, r in moved if r.dim == mark.index and n.outer == n.inner == 1), None)
    return Mark(tuple(sorted(rows, key=lambda r: r.dim)), None, index)


def _reshaped(rows: Rows, pair: Pair) -> Rows:
    """Returns the rows along the dim of the new shape that has them."""
    if rows.is_uniform:
        rows = replace(rows, outer=1, inner=pair.operand(0)[0][rows.dim] // pair.shares[0])
    for dim in pair.varying():
        sizes = zip(pair.operand(0), pair.out(), pair.shares, strict=True)
        layouts = {_layout_along(dim, rows, *size) for size in sizes}
        if len(layouts) == 1 and (layout := layouts.pop()) is not None:
            return replace(rows, dim=dim, outer=layout[0], inner=layout[1])
    raise UndecidedError("rows along no dim")


def _layout_along(
    dim: int, rows: Rows, old: Shape, new: Shape, share: int
) -> tuple[int, int] | None:
    below = math.prod(new[dim + 1 :])
    inner, rest = divmod(rows.inner * math.prod(old[rows.dim + 1 :]), below) if below else (0, 1)
    if rest or not inner or new[dim] % (inner * share):
        return None
    return new[dim] // (inner * share), inner


def transpose(pair: Pair, marks: list[Mark]) -> Mark:
    """Dims are permuted."""
    order = [int(d) for d in pair.params["permutation"]]
    return _moved(marks[0], {old: new for new, old in enumerate(order)})


def removing(key: str) -> Rule:
    """Returns the rule of an operation that removes dims without rows, such as ``squeeze``."""
    return lambda pair, marks: without_dims(pair, marks[0], pair.dims(key))


def without_dims(pair: Pair, mark: Mark, removed: Collection[int]) -> Mark:
    """Returns the mark of the first operand without some dims, which must not have rows."""
    kept = [d for d in range(len(pair.operand(0)[0])) if d not in removed]
    return _moved(mark, {old: new for new, old in enumerate(kept)})


def _moved(mark: Mark, places: dict[int, int]) -> Mark:
    rows = sorted((replace(r, dim=places[r.dim]) for r in mark.rows), key=lambda r: r.dim)
    return Mark(tuple(rows), mark.const, None if mark.index is None else places[mark.index])


def concatenate(pair: Pair, marks: list[Mark]) -> Mark:
    """Arrays of the same rows side by side, or whole shares one after the other."""
    along = pair.params["dimension"]
    column = _column(pair, marks, along)

    def pad(pads: list[Pad]) -> Pad:
        if column is not None:  # the index of a row of padding is as valid as any
            pads = [p for p, mark in zip(pads, marks, strict=True) if mark.index is None] or pads
        return join_pads(pads)

    rows = []
    for dim in pair.varying():
        parts = [mark.at(dim) for mark in marks]
        if dim == along:
            [inner] = {r.inner for r in parts if r and not r.is_uniform} or {1}
            for k, trace in itertools.product(range(len(parts)), (0, 1)):
                if pair.operand(k)[trace][dim] % (pair.shares[trace] * inner):
                    raise UndecidedError("rows are shifted")
            outer = pair.out()[0][dim] // (pair.shares[0] * inner)
            parts = [r and replace(r, outer=outer, inner=inner) for r in parts]
        rows.append(aligned_rows(dim, list(zip(marks, parts, strict=True)), pad))
    return Mark(tuple(rows), column=column)


def _column(pair: Pair, marks: Sequence[Mark], along: int) -> tuple[int, int] | None:
    """Returns the ``column`` of indices that are stacked for ``x[arange, y]``; None for others."""
    if along != len(pair.out()[0]) - 1:
        return None
    for k, mark in enumerate(marks):
        if mark.index is not None and mark.index != along and pair.operand(k)[0][along] == 1:
            return sum(pair.operand(j)[0][along] for j in range(k)), mark.index
    return None


def stack(pair: Pair, marks: list[Mark]) -> Mark:
    """Arrays of the same rows along a new dim."""
    axis = pair.params["axis"]
    if axis in pair.varying():
        raise UndecidedError("as many arrays as rows")
    places = [(dim, dim - (dim > axis)) for dim in pair.varying()]
    rows = [aligned_rows(dim, [(mark, mark.at(old)) for mark in marks]) for dim, old in places]
    return Mark(tuple(rows))


def slice_(pair: Pair, marks: list[Mark]) -> Mark:
    """All rows, or complete shares, are kept; other dims may be cut."""
    starts, limits = pair.both("start_indices"), pair.both("limit_indices")
    strides = pair.params["strides"] or (1,) * len(starts[0])
    rows: list[Rows] = []
    for dim, stride in enumerate(strides):
        cut = [(starts[k][dim], limits[k][dim]) for k in (0, 1)]
        rows += _cut_rows(pair, marks[0].at(dim), dim, cut, stride)
    return Mark(tuple(rows), marks[0].const)


def split(pair: Pair, marks: list[Mark]) -> list[Mark]:
    """Slices along one dim."""
    axis, sizes, [mark] = pair.params["axis"], pair.both("sizes"), marks
    others = [r for r in mark.rows if r.dim != axis]
    outs = []
    for k in range(len(pair.outvars)):
        cut = [(int(sum(s[:k])), int(sum(s[: k + 1]))) for s in sizes]
        new = _cut_rows(pair, mark.at(axis), axis, cut, 1)
        outs.append(Mark(tuple(sorted(others + new, key=lambda r: r.dim)), mark.const))
    return outs


def _cut_rows(
    pair: Pair, rows: Rows | None, dim: int, cut: Sequence[tuple[int, int]], stride: int
) -> list[Rows]:
    """Returns the rows of a slice along a dim; an empty list if it has none, or none are left."""
    if rows is None and cut[0] == cut[1]:
        return []
    if rows is not None and stride == 1:
        if [(0, shape[dim]) for shape in pair.operand(0)] == list(cut):
            return [rows]
        if rows.is_uniform:
            return [rows] if cut[0][1] - cut[0][0] != cut[1][1] - cut[1][0] else []
        blocks = {
            tuple(divmod(end, share * rows.inner) for end in ends)
            for ends, share in zip(cut, pair.shares, strict=True)
        }
        [((first, rest), (last, more))] = blocks
        if not rest and not more:
            return [replace(rows, outer=last - first)]
    raise UndecidedError("some rows")


def pad(pair: Pair, marks: list[Mark]) -> Mark:
    """Along rows only complete shares are added, as by the gradient of a slice of shares."""
    mark, value = marks
    configs = pair.both("padding_config")
    if all(tuple(c) == (0, 0, 0) for of_trace in configs for c in of_trace):
        return Mark(mark.rows, mark.const)
    rows: list[Rows] = []
    for dim, config in enumerate(zip(*configs, strict=True)):
        old = mark.at(dim)
        if config[0][2] != config[1][2] or (old and config[0][2]):
            raise UndecidedError("a border between rows")
        sizes = [shape[dim] for shape in pair.operand(0)]
        ends = [(-low, size + high) for (low, high, _), size in zip(config, sizes, strict=True)]
        if old and old.is_uniform and ends != [(0, size) for size in sizes]:
            if sizes[0] % pair.shares[0]:
                raise UndecidedError("a border of some rows")
            old = replace(old, outer=sizes[0] // pair.shares[0], inner=1)
        rows += _cut_rows(pair, old, dim, ends, 1)
    border = operand_pad(value, None)
    in_rows = all(tuple(c[r.dim]) == (0, 0, 0) for c in configs for r in mark.rows)
    is_same = mark.const is not None or in_rows  # as in a real row, unless it makes new ones
    border = border._replace(is_pure=border.is_pure and is_same)
    pads = [join_pads([operand_pad(mark, r), border]) for r in rows]
    const = mark.const if mark.const == value.const else None
    return Mark(tuple(replace(r, pad=p) for r, p in zip(rows, pads, strict=True)), const)


def dynamic_slice(pair: Pair, marks: list[Mark]) -> Mark:
    """All rows are kept; along other dims the size does not depend on the share."""
    mark, (shape, other) = marks[0], pair.operand(0)
    for dim, size in enumerate(zip(*pair.both("slice_sizes"), strict=True)):
        if size != (shape[dim], other[dim]) if mark.at(dim) else size[0] != size[1]:
            raise UndecidedError("some rows")
    return Mark(mark.rows, mark.const)


def dynamic_update_slice(pair: Pair, marks: list[Mark]) -> Mark:
    """Rows replace the same rows."""
    (shape, _), (update, _) = pair.operand(0), pair.operand(1)
    if any(update[dim] != shape[dim] for dim in pair.varying()):
        raise UndecidedError("some rows")
    return Mark(in_place(pair, marks[:2]))


def iota(pair: Pair, marks: list[Mark]) -> Mark:
    """Indices along one dim."""
    along, varying = pair.params["dimension"], pair.varying()
    inner = pair.out()[0][along] // pair.shares[0]
    layouts = {along: (1, inner)}
    rows = (Rows(dim, *layouts.get(dim, (0, 0)), FINITE, data=False) for dim in varying)
    return Mark(tuple(rows), index=along if along in varying and inner == 1 else None)


def random_bits(pair: Pair, marks: list[Mark]) -> Mark:
    """Random numbers for each row, or drawn with a key of each row."""
    rows = []
    for dim in pair.varying():
        inner = pair.out()[0][dim] // pair.shares[0]
        rows.append(marks[0].at(dim) or Rows(dim, 1, inner, PURE, data=False))
    return Mark(tuple(rows))


def real_rows(pair: Pair, marks: list[Mark]) -> Mark:
    """The mask of a partial batch."""
    if len(pair.out()[0]) != 1:
        raise UndecidedError("a mask of several dims")
    pad = known_pad(False)
    return Mark((Rows(0, 1, 1, pad, data=False),), empty=pad)
