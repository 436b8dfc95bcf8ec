"""Transfer rules of the padding proof for operations on arrays, by primitive.

A rule gets the marks of the operands, none of which leaks, and returns the mark of the output, or a list of
several. It fails for a form of the operation that it does not know, which then may leak.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from jax.lax import GatherScatterMode

from distribute_jax._mesh import DATA
from distribute_jax.program import _padding_shape_rules as shapes
from distribute_jax.program._padding_marks import (
    ANY,
    CLEAN,
    FINITE,
    PURE,
    Mark,
    Operand,
    Pad,
    Pair,
    Rows,
    Rule,
    UndecidedError,
    aligned_rows,
    computed_pad,
    elementwise_pad,
    is_neutral,
    join_pads,
    known_pad,
    leaking,
    operand_pad,
)

# Reductions


def reduce(pair: Pair, marks: list[Mark]) -> Mark:
    """Rows may be reduced if their padding is neutral."""
    mark, axes = marks[0], pair.dims("axes")
    row_count_at = ""
    for r in mark.rows:
        if r.dim not in axes or is_neutral(pair.name, r.pad.number, pair.dtype()):
            continue
        if r.data and r.pad.number is None:
            certain = r.pad.is_pure and pair.name in ("reduce_sum", "reduce_prod")
            return leaking(pair.where, certain=certain)
        row_count_at = pair.where
    kept = tuple(r for r in mark.rows if r.dim not in axes)
    # Padding that is neutral, or of rows that are gone, makes nothing nonfinite.
    seen = mark if row_count_at else Mark(kept, mark.const)
    rows = tuple(replace(r, pad=_reduced_pad(pair.name, operand_pad(seen, r))) for r in kept)
    return replace(shapes.without_dims(pair, Mark(rows), axes), row_count_at=row_count_at)


def _reduced_pad(operation: str, pad: Pad) -> Pad:
    if operation in ("reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        return join_pads([pad])
    return _linear_pad([pad]) if operation in ("reduce_sum", "reduce_prod") else computed_pad([pad])


def _linear_pad(pads: Sequence[Pad]) -> Pad:
    """Returns the padding after a function that is zero for zeros."""
    return computed_pad(pads, 0 if all(pad.number == 0 for pad in pads) else None)


def along(key: str, *, linear: bool = False) -> Rule:
    """Returns the rule of an operation that keeps all dims, and works along some without rows."""

    def rule(pair: Pair, marks: list[Mark]) -> Mark:
        if any(mark.at(dim) for mark in marks for dim in pair.dims(key)):
            raise UndecidedError("along rows")
        return Mark(shapes.in_place(pair, marks, _linear_pad if linear else computed_pad))

    return rule


_PLAIN_WINDOW = {
    "window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1,
    "window_dilation": 1,
}  # fmt: skip
_SUMS_OF_WINDOWS = ("reduce_window_sum", "select_and_scatter_add", "select_and_gather_add")


def windows(pair: Pair, marks: list[Mark]) -> Mark:
    """Pooling, with windows of one row."""
    sizes = [(pair.params.get(key), plain) for key, plain in _PLAIN_WINDOW.items()]
    if any(size and size[dim] != plain for dim in pair.varying() for size, plain in sizes):
        raise UndecidedError("windows of several rows")
    is_linear = pair.name in _SUMS_OF_WINDOWS and not any(mark.may_be_nonfinite for mark in marks)

    def pad(pads: list[Pad]) -> Pad:
        return computed_pad(pads, 0 if is_linear and pads[0].number == 0 else None)

    return Mark(shapes.in_place(pair, marks, pad))


# Products


def dot_general(pair: Pair, marks: list[Mark]) -> Mark:
    """Rows may be contracted if one factor is zero in the padding."""
    contract, batch = pair.params["dimension_numbers"]
    rows = [(a, b, k) for k, (a, b) in enumerate(zip(*batch, strict=True))]
    free = [
        (side, dim)
        for side in (0, 1)
        for dim in range(len(pair.operand(side)[0]))
        if dim not in {*contract[side], *batch[side]}
    ]
    placed = [(side, dim, len(rows) + k) for k, (side, dim) in enumerate(free)]
    return products(pair, marks, list(zip(*contract, strict=True)), rows, placed)


def products(
    pair: Pair,
    marks: list[Mark],
    contracted: Sequence[tuple[int, int]],
    batch: Sequence[tuple[int, int, int]],
    free: Sequence[tuple[int, int, int]],
) -> Mark:
    """Returns the mark of sums of products of two arrays.

    ``contracted`` has pairs of dims that are summed over; ``batch`` pairs of dims with that of the result;
    ``free`` the position of a factor, its dim, and the dim of the result.
    """
    one, two = marks
    sums = [_summed_products(pair, (one, one.at(a)), (two, two.at(b))) for a, b in contracted]
    if leak := next((summed for summed in sums if summed.leak), None):
        return leak
    rows: list[Rows] = []
    for a, b, new in batch:
        if one.at(a) or two.at(b):
            rows.append(aligned_rows(new, [(one, one.at(a)), (two, two.at(b))], _product_pad))
    for side, dim, new in free:
        if old := marks[side].at(dim):
            operands: list[Operand] = [(marks[side], old), (marks[1 - side], None)]
            rows.append(aligned_rows(new, operands, _product_pad, everywhere=False))
    row_count_at = next((summed.row_count_at for summed in sums if summed.row_count_at), "")
    return Mark(tuple(sorted(rows, key=lambda r: r.dim)), row_count_at=row_count_at)


def _summed_products(pair: Pair, left: Operand, right: Operand) -> Mark:
    """Returns the mark of a sum over one dim of each factor."""
    if left[1] is None and right[1] is None:
        return CLEAN
    rows = aligned_rows(0, [left, right], functools.partial(elementwise_pad, "mul"))
    if rows.pad.number == 0:
        return CLEAN
    pads = [operand_pad(*left), operand_pad(*right)]
    certain = all(pad.is_pure for pad in pads)
    if rows.data and (certain or any(pad.number is None for pad in pads)):
        return leaking(pair.where, certain=certain)
    return Mark(row_count_at=pair.where)


def _product_pad(pads: Sequence[Pad]) -> Pad:
    return _linear_pad([elementwise_pad("mul", pads)])


def convolution(pair: Pair, marks: list[Mark]) -> Mark:
    """A contraction of features, for each example."""
    params, [image, kernel] = pair.params, marks
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    mixed = [image.at(d) for d in lhs[2:]] + [kernel.at(d) for d in rhs[2:]]
    if params["feature_group_count"] != 1:
        mixed += [image.at(lhs[1]), kernel.at(rhs[1])]
    if params["batch_group_count"] != 1:
        mixed += [image.at(lhs[0]), kernel.at(rhs[0])]
    if any(mixed):
        raise UndecidedError("a window over rows")
    return products(pair, marks, [(lhs[1], rhs[1])], [], [(0, lhs[0], out[0]), (1, rhs[0], out[1])])


# Gather and scatter


def gather(pair: Pair, marks: list[Mark]) -> Mark:
    """Reads from a table without rows, or for each row from that row."""
    numbers, (operand, indices) = pair.params["dimension_numbers"], marks
    sizes, lengths = pair.both("slice_sizes"), pair.operand(0)
    dims = range(len(lengths[0]))
    aligned = _aligned_dims(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims,
        numbers.start_index_map, numbers.collapsed_slice_dims, marks,
    )  # fmt: skip
    collapsed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = dict(zip([d for d in dims if d not in collapsed], numbers.offset_dims, strict=True))
    batch = [d for d in range(len(pair.out()[0])) if d not in numbers.offset_dims]
    operands_of: dict[int, list[Operand]] = defaultdict(list)
    for dim in dims:
        rows = operand.at(dim)
        complete = all(s[dim] == length[dim] for s, length in zip(sizes, lengths, strict=True))
        if rows is None:
            if sizes[0][dim] != sizes[1][dim]:
                raise UndecidedError("a window that depends on the share")
        elif dim in aligned:
            operands_of[batch[aligned[dim]]].append((operand, rows))
        elif dim in windows and complete and dim not in numbers.start_index_map:
            operands_of[windows[dim]].append((operand, rows))
        else:
            raise UndecidedError("some rows")
    for rows in indices.rows:
        operands_of[batch[rows.dim]].append((indices, rows))

    fills = pair.params["mode"] is GatherScatterMode.FILL_OR_DROP
    # Only indices of padding may be outside, where the result is NaN.
    outside = fills and not all(r.pad.is_pure or r.pad.number == 0 for r in indices.rows)

    def pad(from_operand: bool, pads: list[Pad]) -> Pad:
        if operand.may_be_nonfinite:
            return ANY
        if from_operand and pads[0].number == 0 and not outside:
            return known_pad(0)
        return PURE if all(pad.is_pure for pad in pads) else ANY

    return Mark(
        tuple(
            aligned_rows(dim, operands, functools.partial(pad, operands[0][0] is operand))
            for dim, operands in sorted(operands_of.items())
        )
    )


def _aligned_dims(
    batching: Sequence[int],
    batching_indices: Sequence[int],
    indexed: Sequence[int],
    collapsed: Sequence[int],
    marks: Sequence[Mark],
) -> dict[int, int]:
    """Returns the dims of the operand whose index is that of a dim of the indices, with that dim."""
    operand, indices = marks[:2]
    aligned = dict(zip(batching, batching_indices, strict=True))
    if indices.column is not None and indices.column[0] < len(indexed):
        dim = indexed[indices.column[0]]
        if dim in collapsed and operand.at(dim) is not None:
            aligned[dim] = indices.column[1]
    return aligned


def scatter(pair: Pair, marks: list[Mark]) -> Mark:
    """Each row is written to the same row, or padding adds zeros to a table."""
    numbers, (operand, indices, updates) = pair.params["dimension_numbers"], marks
    adds = pair.name == "scatter-add"
    windows = list(numbers.update_window_dims)
    batch = [d for d in range(len(pair.operand(2)[0])) if d not in windows]
    aligned = _aligned_dims(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims,
        numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, marks,
    )  # fmt: skip
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    dims = [d for d in range(len(pair.operand(0)[0])) if d not in inserted]
    places = dict(zip(dims, windows, strict=True))
    places |= {dim: batch[at] for dim, at in aligned.items()}

    rows = []
    for r in operand.rows:
        if r.dim in numbers.scatter_dims_to_operand_dims and r.dim not in aligned:
            raise UndecidedError("some rows")
        operands: list[Operand] = [(operand, r), (updates, updates.at(places[r.dim]))]
        new = aligned_rows(r.dim, operands, _linear_pad if adds else join_pads)
        is_pure = new.pad.is_pure and all(i.pad.is_pure for i in indices.rows)
        data = new.data or any(i.data for i in indices.rows)
        rows.append(replace(new, pad=new.pad._replace(is_pure=is_pure), data=data))
    written = {places[r.dim] for r in operand.rows}
    for r in updates.rows:
        if r.dim not in written and not (adds and r.pad.number == 0):
            has_number = r.pad.is_pure or r.pad.number is not None
            is_counted = has_number and any(i.data and i.pad.is_pure for i in indices.rows)
            return leaking(pair.where, certain=adds and is_counted)
    return Mark(tuple(rows))


# Collectives


def psum(pair: Pair, marks: list[Mark]) -> list[Mark]:
    """Each row is summed with the rows of the other replicas at the same index."""
    if any(isinstance(axis, int) for axis in pair.params["axes"]):
        raise UndecidedError("a sum over a dim as well")
    return [
        Mark(tuple(replace(r, pad=FINITE, data=True) for r in mark.rows))
        if all(r.pad.number == 0 for r in mark.rows)
        else leaking(pair.where, certain=any(r.pad.is_pure and r.data for r in mark.rows))
        for mark in marks
    ]


ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le",
    "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "or", "polygamma", "population_count", "pow", "random_fold_in", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan",
    "tanh", "xor", "zeta", "threefry2x32", "random_seed", "random_wrap", "random_unwrap",
    "bitcast_convert_type", "mulhi", "log2", "one_minus_square", "polynomial",
)  # fmt: skip
"""Primitives whose entries are computed from those at the same index."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, shapes.elementwise),
    "select_n": shapes.select,
    "broadcast_in_dim": shapes.broadcast,
    "reshape": shapes.reshape,
    "transpose": shapes.transpose,
    "squeeze": shapes.removing("dimensions"),
    "concatenate": shapes.concatenate,
    "stack": shapes.stack,
    "unstack": shapes.removing("axis"),
    "slice": shapes.slice_,
    "split": shapes.split,
    "pad": shapes.pad,
    "dynamic_slice": shapes.dynamic_slice,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "iota": shapes.iota,
    **dict.fromkeys(("random_bits", "random_split"), shapes.random_bits),
    "real_rows": shapes.real_rows,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"), reduce),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), reduce),
    "cumsum": along("axis", linear=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), along("axis")),
    "rev": along("dimensions", linear=True),
    "sort": along("dimension"),
    "top_k": along("axis"),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", *_SUMS_OF_WINDOWS), windows
    ),
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter-add"), scatter),
    **dict.fromkeys(("psum", "psum_invariant"), psum),
}
"""The rules by the primitive's name."""

_ARRANGING = frozenset({
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "concatenate", "stack", "unstack", "slice",
    "split", "rev", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
})  # fmt: skip
"""Operations whose entries are some of their operands'."""


def on_empty_replica(pair: Pair, marks: Sequence[Mark], out: Mark) -> Mark:
    """Returns the mark of a result with what is known of it on a replica without real rows."""
    empty = _pad_if_empty(pair, [mark.if_empty for mark in marks], out)
    # Its rows are all padding: what was not replaced there by a number may differ.
    padded = (m.if_empty.number is None and any(r.data for r in m.rows) for m in marks)
    varies = any(m.varies_if_empty for m in marks) or (not empty.is_finite and any(padded))
    return replace(out, empty=empty, varies_if_empty=varies and empty.number is None)


def _pad_if_empty(pair: Pair, pads: Sequence[Pad], out: Mark) -> Pad:
    if all(pad.is_pure for pad in pads):
        return PURE
    if pair.name in _ARRANGING:
        return join_pads(pads)
    if pair.name in ("psum", "psum_invariant", "pmax", "pmin"):
        # Of all replicas the same, which is finite unless one contributes what is not.
        ignored = {"pmax": -math.inf, "pmin": math.inf}.get(pair.name)
        harmless = all(pad.is_finite or pad.number == ignored for pad in pads)
        return PURE if harmless and DATA in pair.params["axes"] else join_pads(pads)
    if pair.name in ELEMENTWISE:
        return elementwise_pad(pair.name, pads, pair)
    if pair.name == "select_n":
        return shapes.selected_pad(pads)
    if known := next((r.pad for r in out.rows if r.pad.number is not None), None):
        return known
    return _linear_pad(pads) if pair.name in RULES else ANY


CARRIES = frozenset({
    "add", "add_any", "sub", "mul", "div", "neg", "sqrt", "exp", "log", "log1p",
    "expm1", "square", "integer_pow", "rsqrt", "reshape", "broadcast_in_dim", "transpose", "squeeze",
    "reduce_sum", "dot_general", "psum", "psum_invariant", "concatenate",
})  # fmt: skip
"""Operations whose result certainly depends on what leaks into one operand, except for particular numbers."""
