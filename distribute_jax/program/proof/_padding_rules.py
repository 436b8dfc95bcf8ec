"""What each operation on arrays does to rows and to what stands in their padding.

A rule gets the marks of the operands, none of which leaks, and returns the marks of the outputs. It
returns None, or fails, for a form of the operation that it does not know, which then may leak.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from jax.extend.core import Jaxpr

from distribute_jax.program.proof._marks import ClosedJaxpr, line, name
from distribute_jax.program.proof._padding_marks import (
    ANY,
    CLEAN,
    FINITE,
    PURE,
    Mark,
    Pad,
    Padded,
    Rows,
    common_layout,
    evaluated,
    folded,
    is_neutral,
    is_number,
    joined_pad,
    leaking,
    operand_pad,
)

Shape = tuple[int, ...]


class Walk(Protocol):
    """What a rule may ask of the pass that applies it."""

    shares: tuple[int, int]


class Pair:
    """An equation of the step, and the same one where the shares have another length."""

    def __init__(self, eqn: Any, other: Any) -> None:
        """Takes both equations."""
        self.eqn, self.other = eqn, other
        self.name: str = eqn.primitive.name if eqn is not None else ""

    @functools.cached_property
    def where(self) -> str:
        """The operation and the user's line."""
        return f"{name(self.eqn)} at {line(self.eqn)}" if self.eqn is not None else "a result"

    @property
    def is_alike(self) -> bool:
        """Whether both are the same operation on as many operands."""
        return (
            self.eqn.primitive is self.other.primitive
            and len(self.eqn.invars) == len(self.other.invars)
            and len(self.eqn.outvars) == len(self.other.outvars)
        )

    @property
    def has_refs(self) -> bool:
        """Whether it reads or writes a ref."""
        return any(_is_ref(var) for var in (*self.eqn.invars, *self.eqn.outvars))

    @property
    def varies(self) -> bool:
        """Whether an output has another shape where the shares have another length."""
        return any(a != b for a, b in map(self.out, range(len(self.eqn.outvars))))

    def operand(self, index: int) -> tuple[Shape, Shape]:
        """Returns both shapes of an operand."""
        return _shape(self.eqn.invars[index]), _shape(self.other.invars[index])

    def out(self, index: int = 0) -> tuple[Shape, Shape]:
        """Returns both shapes of an output."""
        return _shape(self.eqn.outvars[index]), _shape(self.other.outvars[index])

    def dtype(self, index: int = 0) -> Any:
        """Returns the dtype of an operand."""
        return self.eqn.invars[index].aval.dtype

    def varying(self, index: int = 0) -> list[int]:
        """Returns the dims of an output whose length differs."""
        return [d for d, (a, b) in enumerate(zip(*self.out(index), strict=True)) if a != b]

    def params(self, key: str) -> tuple[Any, Any]:
        """Returns both values of a parameter."""
        return self.eqn.params[key], self.other.params[key]

    def changed_params(self, allowed: Collection[str] = ()) -> bool:
        """Returns whether a parameter other than those allowed differs."""
        two = self.other.params
        return any(key not in allowed and not _same(v, two.get(key)) for key, v in self.eqn.params.items())


def _shape(atom: Any) -> Shape:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_ref(var: Any) -> bool:
    return type(var.aval).__name__ == "AbstractRef" or bool(getattr(var.aval, "has_qdd", False))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (Jaxpr, ClosedJaxpr)):
        return str(one) == str(other)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(np.all((one == other) | ((one != one) & (other != other))))
    except (TypeError, ValueError):
        return False


Rule = Callable[[Walk, Pair, list[Mark]], "list[Mark] | None"]


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
        pad = operand_pad(mark, None).pad
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
    """Returns the rows if they lie along ``dim`` of the new shape."""
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


def _one_after_the_other(
    walk: Walk, pair: Pair, parts: Sequence[Rows]
) -> tuple[int, int] | None:
    inners = {part.inner for part in parts if not part.is_uniform}
    if len(inners) > 1:
        return None
    inner = inners.pop() if inners else 1
    total = pair.out()[0][parts[0].dim]
    return total // (walk.shares[0] * inner), inner


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
        if interior or low % block or high % block or low < 0 or high < 0 or shape[rows.dim] % block:
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


# Reductions


def reduce(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Rows may be reduced if the reduction does not see what stands in their padding."""
    mark, axes = marks[0], {int(a) for a in pair.eqn.params["axes"]}
    amount = ""
    for r in mark.rows:
        if r.dim not in axes or is_neutral(pair.name, r.pad, pair.dtype()):
            continue
        if r.data and isinstance(r.pad, Pad):
            certain = r.pad is PURE and pair.name in ("reduce_sum", "reduce_prod")
            return [leaking(pair.where, certain=certain)]
        amount = pair.where
    rows = tuple(replace(r, pad=_reduced_pad(pair.name, mark, r)) for r in mark.rows if r.dim not in axes)
    out = _without(Mark(rows), axes, len(pair.operand(0)[0]))
    return [replace(out, amount=amount)]


def _reduced_pad(operation: str, mark: Mark, rows: Rows) -> Any:
    stands, is_pure = operand_pad(mark, rows)
    if operation in ("reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        return PURE if is_pure else stands
    if is_number(stands, 0) and operation in ("reduce_sum", "reduce_prod"):
        return 0
    return _changed(stands, is_pure)


def _changed(stands: Any, is_pure: bool) -> Any:
    """Returns what stands in the padding after a function that keeps finite numbers finite."""
    if is_pure:
        return PURE
    if isinstance(stands, Pad):
        return stands
    return FINITE if math.isfinite(stands) else ANY


def along(*keys: str, linear: bool = False) -> Rule:
    """Makes the rule of an operation along dims that are no rows, which keeps all dims."""

    def rule(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
        axes: set[int] = set()
        for key in keys:
            given = pair.eqn.params[key]
            axes |= set(given) if isinstance(given, tuple) else {given}
        rows = []
        for dim in pair.varying():
            parts = [mark.at(dim) for mark in marks]
            known = [part for part in parts if part is not None]
            layout = common_layout(known)
            if dim in axes or layout is None or len(known) != len(parts):
                return [leaking(pair.where)]
            stands = joined_pad([operand_pad(m, p) for m, p in zip(marks, known, strict=True)])
            pure = all(operand_pad(m, p).is_pure for m, p in zip(marks, known, strict=True))
            kept = linear and is_number(stands, 0)
            rows.append(
                Rows(dim, *layout, 0 if kept else _changed(stands, pure), any(p.data for p in known))
            )
        return [Mark(tuple(rows))] * len(pair.eqn.outvars)

    return rule


def windows(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Pooling: windows of one row each."""
    params = pair.eqn.params
    rows = []
    for dim in pair.varying():
        parts = [mark.at(dim) for mark in marks]
        known = [part for part in parts if part is not None]
        layout = common_layout(known)
        plain = all(
            params[key][dim] == one
            for key, one in _PLAIN_WINDOW.items()
            if key in params and params[key]
        )
        if not plain or layout is None or len(known) != len(parts):
            return [leaking(pair.where)]
        pads = [operand_pad(m, p) for m, p in zip(marks, known, strict=True)]
        zero = is_number(pads[0].pad, 0) and pair.name in _SUMS_OF_WINDOWS and not any(
            mark.is_wild for mark in marks
        )
        stands = 0 if zero else _changed(joined_pad(pads), all(p.is_pure for p in pads))
        rows.append(Rows(dim, *layout, stands, any(p.data for p in known)))
    return [Mark(tuple(rows))]


_PLAIN_WINDOW = {
    "window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1,
    "window_dilation": 1,
}  # fmt: skip
_SUMS_OF_WINDOWS = ("reduce_window_sum", "select_and_scatter_add", "select_and_gather_add")


def batched(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Linear algebra: a matrix for each row."""
    outs = []
    for k in range(len(pair.eqn.outvars)):
        rows = []
        for dim in pair.varying(k):
            parts = [mark.at(dim) for mark in marks]
            known = [part for part in parts if part is not None]
            layout = common_layout(known)
            if layout is None or dim >= len(pair.operand(0)[0]) - 2 or len(known) != len(parts):
                return [leaking(pair.where)]
            pure = all(operand_pad(m, p).is_pure for m, p in zip(marks, known, strict=True))
            rows.append(Rows(dim, *layout, PURE if pure else ANY, any(p.data for p in known)))
        outs.append(Mark(tuple(rows)))
    return outs


# Products


def dot_general(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Sums of products: over rows only where one factor is zero in the padding."""
    (contract, batch) = pair.eqn.params["dimension_numbers"]
    pairs = list(zip(*contract, strict=True))
    lined_up = [(a, b, k) for k, (a, b) in enumerate(zip(*batch, strict=True))]
    frees = []
    place = len(lined_up)
    for side in (0, 1):
        used = {*contract[side], *batch[side]}
        for dim in range(len(pair.operand(side)[0])):
            if dim not in used:
                frees.append((side, dim, place))
                place += 1
    return products(pair, marks, pairs, lined_up, frees)


def products(
    pair: Pair,
    marks: list[Mark],
    contracted: Sequence[tuple[int, int]],
    lined_up: Sequence[tuple[int, int, int]],
    free: Sequence[tuple[int, int, int]],
) -> list[Mark]:
    """Returns the mark of sums of products of two arrays.

    Args:
        pair: The equation.
        marks: Those of both factors.
        contracted: A dim of each factor, which are summed over together.
        lined_up: A dim of each factor and the dim of the result that they become.
        free: A factor (0 or 1), its dim, and the dim of the result that it becomes.
    """
    one, two = marks
    rows: list[Rows] = []
    amount = ""
    for a, b in contracted:
        left, right = one.at(a), two.at(b)
        if left is None and right is None:
            continue
        if left is None or right is None or common_layout([left, right]) is None:
            return [leaking(pair.where)]
        pads = [operand_pad(one, left), operand_pad(two, right)]
        if is_number(folded("mul", {}, pads), 0):
            continue
        if left.data or right.data:
            certain = all(p.is_pure for p in pads)
            if certain or any(isinstance(p.pad, Pad) for p in pads):
                return [leaking(pair.where, certain=certain)]
        amount = pair.where
    for a, b, new in lined_up:
        left, right = one.at(a), two.at(b)
        if left is None and right is None:
            continue
        layout = common_layout([left, right]) if left and right else None
        if left is None or right is None or layout is None:
            return [leaking(pair.where)]
        stands = _product_pad([operand_pad(one, left), operand_pad(two, right)])
        rows.append(Rows(new, *layout, stands, left.data or right.data))
    for side, dim, new in free:
        old = marks[side].at(dim)
        if old is not None:
            stands = _product_pad([operand_pad(marks[side], old), operand_pad(marks[1 - side], None)])
            rows.append(replace(old, dim=new, pad=stands))
    return [Mark(tuple(sorted(rows, key=lambda r: r.dim)), amount=amount)]


def _product_pad(pads: Sequence[Padded]) -> Any:
    stands = folded("mul", {}, pads)
    return stands if isinstance(stands, Pad) or stands == 0 else _changed(stands, False)


def convolution(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """A product over the features, for each example."""
    params = pair.eqn.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    grouped = params["feature_group_count"] != 1
    if grouped and (marks[0].at(lhs[1]) or marks[1].at(rhs[1])):
        return None
    if params["batch_group_count"] != 1 and (marks[0].at(lhs[0]) or marks[1].at(rhs[0])):
        return None
    spatial = [(0, d) for d in lhs[2:]] + [(1, d) for d in rhs[2:]]
    if any(marks[side].at(d) for side, d in spatial):
        return None
    free = [(0, lhs[0], out[0]), (1, rhs[0], out[1])]
    return products(pair, marks, [(lhs[1], rhs[1])], [], free)


# Looking up and scattering


def gather(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Looked up in a table, or for each row in that row."""
    numbers, (operand, indices) = pair.eqn.params["dimension_numbers"], marks
    sizes, shapes = pair.params("slice_sizes"), pair.operand(0)
    ndim = len(shapes[0])
    lined = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    collapsed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = dict(zip([d for d in range(ndim) if d not in collapsed], numbers.offset_dims, strict=True))
    out_ndim = len(pair.out()[0])
    batch = [d for d in range(out_ndim) if d not in numbers.offset_dims]
    if indices.column is not None and indices.column[0] < len(numbers.start_index_map):
        own = numbers.start_index_map[indices.column[0]]
        if own in collapsed and operand.at(own) is not None:
            lined[own] = indices.column[1]
    rows: dict[int, list[tuple[Mark, Rows]]] = {}
    for dim, r in enumerate(operand.at(d) for d in range(ndim)):
        if r is None:
            if sizes[0][dim] != sizes[1][dim]:
                return [leaking(pair.where)]
        elif dim in lined:
            rows.setdefault(batch[lined[dim]], []).append((operand, r))
        elif dim in whole and all(s[dim] == shape[dim] for s, shape in zip(sizes, shapes, strict=True)):
            if dim in numbers.start_index_map:
                return [leaking(pair.where)]
            rows.setdefault(whole[dim], []).append((operand, r))
        else:
            return [leaking(pair.where)]
    for r in indices.rows:
        rows.setdefault(batch[r.dim], []).append((indices, r))
    return [_looked_up(pair, rows, operand, indices)]


def _looked_up(
    pair: Pair, rows: dict[int, list[tuple[Mark, Rows]]], operand: Mark, indices: Mark
) -> Mark:
    found = []
    for dim, parts in sorted(rows.items()):
        layout = common_layout([r for _, r in parts])
        if layout is None:
            return leaking(pair.where)
        pads = [operand_pad(mark, r) for mark, r in parts]
        stands: Any = PURE if all(p.is_pure for p in pads) else ANY
        if parts[0][0] is operand and is_number(pads[0].pad, 0) and not indices.is_wild:
            stands = 0
        if operand.is_wild:
            stands = ANY
        found.append(Rows(dim, *layout, stands, any(r.data for _, r in parts)))
    return Mark(tuple(found))


def scatter(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """Rows are written to their own row, or zeros of padding are added to a table."""
    numbers, (operand, indices, updates) = pair.eqn.params["dimension_numbers"], marks
    shapes = pair.operand(0)
    ndim = len(shapes[0])
    windows_of_updates = list(numbers.update_window_dims)
    batch = [d for d in range(len(pair.operand(2)[0])) if d not in windows_of_updates]
    lined = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    if indices.column is not None and indices.column[0] < len(numbers.scatter_dims_to_operand_dims):
        own = numbers.scatter_dims_to_operand_dims[indices.column[0]]
        if own in numbers.inserted_window_dims and operand.at(own) is not None:
            lined[own] = indices.column[1]
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    places = dict(zip([d for d in range(ndim) if d not in inserted], windows_of_updates, strict=True))
    rows, met = [], set()
    for r in operand.rows:
        at = batch[lined[r.dim]] if r.dim in lined else places.get(r.dim)
        new = None if at is None else updates.at(at)
        whole = r.dim in lined or r.dim not in numbers.scatter_dims_to_operand_dims
        layout = common_layout([r, new]) if new else None
        if at is None or new is None or layout is None or not whole:
            return [leaking(pair.where)]
        met.add(at)
        pads = [operand_pad(operand, r), operand_pad(updates, new)]
        if pair.name == "scatter-add" and all(is_number(p.pad, 0) for p in pads):
            stands: Any = 0
        else:
            pure = all(p.is_pure for p in pads) and not indices.is_wild
            stands = joined_pad(pads) if not pure else PURE
        rows.append(Rows(r.dim, *layout, stands, r.data or new.data))
    for r in updates.rows:
        if r.dim not in met and not (pair.name == "scatter-add" and is_number(r.pad, 0)):
            counted = any(i.data and i.pad is PURE for i in indices.rows) and r.pad is not ANY
            return [leaking(pair.where, certain=pair.name == "scatter-add" and counted)]
    return [Mark(tuple(rows))]


# Collectives


def psum(walk: Walk, pair: Pair, marks: list[Mark]) -> list[Mark] | None:
    """The rows of all replicas are mixed, each with those in the same place."""
    axes = pair.eqn.params["axes"]
    if any(isinstance(axis, int) for axis in axes):
        return None
    outs = []
    for mark in marks:
        if not mark.rows:
            outs.append(Mark())
        elif all(is_number(r.pad, 0) for r in mark.rows):
            outs.append(Mark(tuple(replace(r, pad=FINITE, data=True) for r in mark.rows)))
        else:
            outs.append(leaking(pair.where, certain=any(r.pad is PURE and r.data for r in mark.rows)))
    return outs


_KEEPING = ("convert_element_type", "copy", "copy_p", "stop_gradient")

_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le",
    "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "or", "polygamma", "population_count", "pow", "random_fold_in", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor", "zeta", "threefry2x32", "random_seed", "random_wrap", "random_unwrap",
    "bitcast_convert_type", "mulhi",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    "select_n": select,
    "broadcast_in_dim": broadcast,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "concatenate": concatenate,
    "slice": slice_,
    "split": split,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "iota": iota,
    "random_bits": random_bits,
    "random_split": random_bits,
    "real_rows": real_rows,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"), reduce),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), reduce),
    **dict.fromkeys(("cumsum",), along("axis", linear=True)),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), along("axis")),
    "rev": along("dimensions", linear=True),
    "sort": along("dimension"),
    "top_k": along("axis"),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", *_SUMS_OF_WINDOWS), windows
    ),
    **dict.fromkeys(("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"), batched),
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter-add"), scatter),
    **dict.fromkeys(("psum", "psum_invariant"), psum),
}
"""The rule of each primitive that has one, by the primitive's name."""

CARRIES = frozenset({
    "add", "add_any", "sub", "mul", "div", "neg", "copy", "copy_p", "sqrt", "exp", "log", "log1p",
    "expm1", "square", "integer_pow", "rsqrt", "reshape", "broadcast_in_dim", "transpose", "squeeze",
    "reduce_sum", "dot_general", "psum", "psum_invariant", "concatenate", "stop_gradient",
})  # fmt: skip
"""Operations whose result surely shows what leaks into one operand, as far as numbers go."""
