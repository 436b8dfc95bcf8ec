"""What operations on each entry, and on shapes, do to rows and to what stands in their padding."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from distribute_jax.program._padding_marks import (
    ANY,
    FINITE,
    PURE,
    Mark,
    Pad,
    Padded,
    Pair,
    Rows,
    Shape,
    Walk,
    common_layout,
    evaluated,
    folded,
    joined_pad,
    leaking,
    operand_pad,
)

_KEEPING = ("convert_element_type", "copy", "copy_p", "stop_gradient")


# Operations on each entry


def elementwise(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Each entry is computed from those in the same place, and from scalars."""
    params = pair.eqn.params
    consts = [mark.const for mark in marks]
    const = None if any(c is None for c in consts) else evaluated(pair.name, params, consts)
    if const is None and pair.name in ("lt", "ge") and marks[0].index is not None:
        below = not isinstance(marks[1].const, bool) and marks[1].const == 0
        const = (pair.name == "ge") if below else None
    index = marks[0].index if pair.name in _KEEPING else None
    column = marks[0].column if pair.name in _KEEPING else None
    rows = []
    for dim in pair.varying():
        parts = [mark.at(dim) for mark in marks]
        layout = common_layout([part for part in parts if part is not None])
        if layout is None:
            return [leaking(pair.where)]
        pads = [operand_pad(mark, part) for mark, part in zip(marks, parts, strict=True)]
        pad = folded(pair.name, params, pads) if const is None else const
        data = any(part.data for part in parts if part is not None)
        rows.append(Rows(dim, *layout, pad, data) if const is None else Rows(dim, 0, 0, pad, False))
    return [Mark(tuple(rows), const, index, column)] * len(pair.eqn.outvars)


def select(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """``select_n``: a mask of rows decides what stands in the padding."""
    which, *cases = marks
    if which.const is not None and int(which.const) < len(cases):
        return [cases[int(which.const)]]
    rows = []
    for dim in pair.varying():
        parts = [mark.at(dim) for mark in marks]
        layout = common_layout([part for part in parts if part is not None])
        if layout is None:
            return [leaking(pair.where)]
        decided = operand_pad(which, parts[0])
        pads = [operand_pad(mark, part) for mark, part in zip(cases, parts[1:], strict=True)]
        if not isinstance(decided.pad, Pad) and not decided.is_pure:
            pad = pads[int(decided.pad)].pad
            chosen = parts[1 + int(decided.pad)]
            if pad is PURE and (chosen is None or not chosen.data):
                pad = ANY  # no real row need hold what only stands in the padding
        else:
            pad = joined_pad(pads)
            pad = FINITE if pad is PURE and not decided.is_pure else pad
        data = any(part.data for part in parts if part is not None)
        rows.append(Rows(dim, *layout, pad, data))
    return [Mark(tuple(rows))]


# Operations on shapes


def broadcast(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Dims are added, along which the entries do not differ."""
    mark, places = marks[0], [int(d) for d in pair.eqn.params["broadcast_dimensions"]]
    rows = {}
    for dim in pair.varying():
        old = mark.at(places.index(dim)) if dim in places else None
        pad = PURE if mark.const is None else mark.const
        rows[dim] = replace(old, dim=dim) if old else Rows(dim, 0, 0, pad, data=False)
    index = places[mark.index] if mark.index is not None else None
    return [Mark(tuple(rows.values()), mark.const, index)]


def reshape(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Dims are merged and taken apart; rows stay rows if each keeps the same stride."""
    if pair.eqn.params.get("dimensions") is not None:
        return None
    mark, (olds, news) = marks[0], (pair.operand(0), pair.out())
    if mark.const is not None:
        return [Mark(tuple(Rows(d, 0, 0, mark.const, False) for d in pair.varying()), mark.const)]
    rows: list[Rows] = []
    for r in mark.rows:
        if r.is_uniform:
            r = replace(r, outer=1, inner=olds[0][r.dim] // walk.shares[0])
        fit = (_reshaped(r, olds, news, dim, walk.shares) for dim in pair.varying())
        new = next((f for f in fit if f is not None), None)
        if new is None:
            return [leaking(pair.where)]
        rows.append(new)
    moved = zip(rows, mark.rows, strict=True)
    index = next((n.dim for n, r in moved if r.dim == mark.index and n.outer == n.inner == 1), None)
    return [Mark(tuple(sorted(rows, key=lambda r: r.dim)), None, index)]


def _reshaped(
    rows: Rows, olds: tuple[Shape, Shape], news: tuple[Shape, Shape], dim: int, shares: Any
) -> Rows | None:
    """Returns the rows if they are along ``dim`` of the new shape."""
    found = set()
    for old, new, share in zip(olds, news, shares, strict=True):
        stride = rows.inner * math.prod(old[rows.dim + 1 :])
        below = math.prod(new[dim + 1 :])
        inner, rest = divmod(stride, below) if below else (0, 1)
        if rest or not inner or new[dim] % (inner * share):
            return None
        found.add((new[dim] // (inner * share), inner))
    if len(found) != 1:
        return None
    outer, inner = found.pop()
    return replace(rows, dim=dim, outer=outer, inner=inner)


def transpose(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Dims change places."""
    order = [int(d) for d in pair.eqn.params["permutation"]]
    return [_moved(marks[0], {old: new for new, old in enumerate(order)})]


def squeeze(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Dims of size 1 go."""
    gone = {int(d) for d in pair.eqn.params["dimensions"]}
    return [_without(marks[0], gone, len(pair.operand(0)[0]))]


def _moved(mark: Mark, places: dict[int, int]) -> Mark:
    rows = sorted((replace(r, dim=places[r.dim]) for r in mark.rows), key=lambda r: r.dim)
    return Mark(tuple(rows), mark.const, None if mark.index is None else places[mark.index])


def _without(mark: Mark, gone: Collection[int], ndim: int) -> Mark:
    """Returns the mark of an array without dims that hold no rows."""
    kept = [d for d in range(ndim) if d not in gone]
    return _moved(mark, {old: new for new, old in enumerate(kept)})


def concatenate(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Arrays of the same rows side by side, or whole shares one after the other."""
    along = pair.eqn.params["dimension"]
    column = _column(pair, marks, along)
    rows = []
    for dim in pair.varying():
        parts = [mark.at(dim) for mark in marks]
        if any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        layout = common_layout(known)
        if dim == along:
            layout = _one_after_the_other(walk, pair, known)
        if layout is None:
            return [leaking(pair.where)]
        pads = [operand_pad(m, p) for m, p in zip(marks, known, strict=True)]
        if column is not None:  # the index of a row of padding is as good as any
            pads = [p for p, mark in zip(pads, marks, strict=True) if mark.index is None] or pads
        rows.append(Rows(dim, *layout, joined_pad(pads), any(part.data for part in known)))
    return [Mark(tuple(rows), column=column)]


def _one_after_the_other(walk: Walk, pair: Pair, parts: Sequence[Rows]) -> tuple[int, int] | None:
    inners = {part.inner for part in parts if not part.is_uniform}
    if len(inners) > 1:
        return None
    inner = inners.pop() if inners else 1
    total = pair.out()[0][parts[0].dim]
    return total // (walk.shares[0] * inner), inner


def stack(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Arrays of the same rows along a new dim."""
    axis = pair.eqn.params["axis"]
    rows = []
    for dim in pair.varying():
        known = [r for mark in marks if (r := mark.at(dim - (dim > axis))) is not None]
        layout = common_layout(known)
        if dim == axis or len(known) != len(marks) or layout is None:
            return [leaking(pair.where)]
        pads = [operand_pad(m, r) for m, r in zip(marks, known, strict=True)]
        rows.append(Rows(dim, *layout, joined_pad(pads), any(r.data for r in known)))
    return [Mark(tuple(rows))]


def unstack(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Parts along a dim that holds no rows."""
    axis = pair.eqn.params["axis"]
    if marks[0].at(axis) is not None:
        return None
    part = _without(marks[0], {axis}, len(pair.operand(0)[0]))
    return [part] * len(pair.eqn.outvars)


def _column(pair: Pair, marks: Sequence[Mark], along: int) -> tuple[int, int] | None:
    """Returns which entry along the last dim is the index of its row, as ``x[arange, y]`` makes it."""
    if along != len(pair.out()[0]) - 1:
        return None
    for k, mark in enumerate(marks):
        if mark.index is not None and mark.index != along and pair.operand(k)[0][along] == 1:
            return sum(pair.operand(j)[0][along] for j in range(k)), mark.index
    return None


def slice_(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """All rows, or whole shares of rows, are kept; what is cut is cut from other dims."""
    starts, limits = pair.params("start_indices"), pair.params("limit_indices")
    strides = pair.eqn.params["strides"] or (1,) * len(starts[0])
    mark, rows = marks[0], []
    for dim, sizes in enumerate(zip(*pair.operand(0), strict=True)):
        cut = [(starts[k][dim], limits[k][dim]) for k in (0, 1)]
        old = mark.at(dim)
        if old is None:
            if cut[0] != cut[1]:
                return [leaking(pair.where)]
            continue
        new = _cut_rows(walk, old, sizes, cut, strides[dim])
        if new is None:
            return [leaking(pair.where)]
        rows.extend(new)
    return [Mark(tuple(rows), mark.const)]


def _cut_rows(
    walk: Walk, rows: Rows, sizes: Sequence[int], cut: Sequence[tuple[int, int]], stride: int
) -> list[Rows] | None:
    """Returns the rows of a slice along them; an empty list if the dim holds no rows any more."""
    if stride == 1 and [(0, size) for size in sizes] == list(cut):
        return [rows]
    if stride != 1:
        return None
    if rows.is_uniform:
        return [rows] if cut[0][1] - cut[0][0] != cut[1][1] - cut[1][0] else []
    blocks = set()
    for (start, limit), share in zip(cut, walk.shares, strict=True):
        block = share * rows.inner
        if start % block or limit % block:
            return None
        blocks.add((start // block, limit // block))
    if len(blocks) != 1:
        return None
    first, last = blocks.pop()
    return [replace(rows, outer=last - first)]


def split(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Slices along one dim."""
    axis, sizes = pair.eqn.params["axis"], pair.params("sizes")
    old = marks[0].at(axis)
    outs = []
    for k in range(len(pair.eqn.outvars)):
        ends = [(int(sum(s[:k])), int(sum(s[: k + 1]))) for s in sizes]
        new = [] if old is None else _cut_rows(walk, old, [int(sum(s)) for s in sizes], ends, 1)
        if new is None or (old is None and ends[0] != ends[1]):
            return None
        others = [r for r in marks[0].rows if r.dim != axis]
        outs.append(Mark(tuple(sorted(others + new, key=lambda r: r.dim)), marks[0].const))
    return outs


def pad(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """A border is added: along rows only whole shares, as the gradient of a slice of them does."""
    mark, value = marks
    configs = pair.params("padding_config")
    rows = []
    for dim, config in enumerate(zip(*configs, strict=True)):
        old = mark.at(dim)
        if old is None:
            if config[0] != config[1]:
                return [leaking(pair.where)]
            continue
        if any(tuple(c) != (0, 0, 0) for c in config):
            old = _bordered(walk, old, pair.operand(0), config)
            if old is None:
                return [leaking(pair.where)]
        rows.append(old)
    if all(tuple(c) == (0, 0, 0) for c in configs[0]):
        return [Mark(tuple(rows), mark.const)]
    border = operand_pad(value, None)
    border = Padded(border.pad, False) if mark.const is None else border
    pads = [joined_pad([operand_pad(mark, r), border]) for r in rows]
    const = mark.const if mark.const is not None and mark.const == value.const else None
    return [Mark(tuple(replace(r, pad=p) for r, p in zip(rows, pads, strict=True)), const)]


def _bordered(
    walk: Walk, rows: Rows, shapes: tuple[Shape, Shape], config: Sequence[Any]
) -> Rows | None:
    outers = set()
    inner = rows.inner or 1
    for (low, high, interior), share, shape in zip(config, walk.shares, shapes, strict=True):
        block = share * inner
        if (
            interior
            or low % block
            or high % block
            or low < 0
            or high < 0
            or shape[rows.dim] % block
        ):
            return None
        outers.add((low + high + shape[rows.dim]) // block)
    return replace(rows, outer=outers.pop(), inner=inner) if len(outers) == 1 else None


def dynamic_slice(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """All rows are kept; the place of the slice along other dims does not depend on rows."""
    mark, sizes = marks[0], pair.params("slice_sizes")
    for dim, lengths in enumerate(zip(*pair.operand(0), strict=True)):
        size = (sizes[0][dim], sizes[1][dim])
        if (size != lengths) if mark.at(dim) else (size[0] != size[1]):
            return [leaking(pair.where)]
    return [Mark(mark.rows, mark.const)]


def dynamic_update_slice(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Rows are written to the same rows."""
    mark, update = marks[:2]
    rows = []
    for dim in pair.varying():
        parts = [mark.at(dim), update.at(dim)]
        if pair.operand(1)[0][dim] != pair.operand(0)[0][dim] or None in parts:
            return [leaking(pair.where)]
        known = [part for part in parts if part is not None]
        layout = common_layout(known)
        if layout is None:
            return [leaking(pair.where)]
        stands = joined_pad([operand_pad(mark, parts[0]), operand_pad(update, parts[1])])
        rows.append(Rows(dim, *layout, stands, known[0].data or known[1].data))
    return [Mark(tuple(rows))]


def iota(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Numbers that count along one dim."""
    along = pair.eqn.params["dimension"]
    rows = []
    for dim in pair.varying():
        inner = pair.out()[0][dim] // walk.shares[0]
        layout = (1, inner) if dim == along else (0, 0)
        rows.append(Rows(dim, *layout, FINITE, data=False))
    index = along if along in pair.varying() else None
    return [Mark(tuple(rows), index=index)]


def random_bits(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Numbers drawn for each row, or with the key of each row."""
    rows = []
    for dim in pair.varying():
        old = marks[0].at(dim)
        inner = pair.out()[0][dim] // walk.shares[0]
        rows.append(old or Rows(dim, 1, inner, PURE, data=False))
    return [Mark(tuple(rows))]


def real_rows(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """The mask of a partial batch."""
    if len(pair.out()[0]) != 1:
        return None
    return [Mark((Rows(0, 1, 1, False, data=False),))]
