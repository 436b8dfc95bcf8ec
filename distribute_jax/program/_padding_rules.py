"""What each operation on arrays does to rows and to what stands in their padding.

A rule gets the marks of the operands, none of which leaks, and returns the marks of the outputs. It
returns None, or fails, for a form of the operation that it does not know, which then may leak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distribute_jax.program._padding_marks import (
    ANY,
    CLEAN,
    FINITE,
    PURE,
    Mark,
    Pad,
    Padded,
    Pair,
    Rows,
    Rule,
    Walk,
    common_layout,
    folded,
    is_neutral,
    is_number,
    joined_pad,
    leaking,
    operand_pad,
)
from distribute_jax.program._padding_shape_rules import (
    _without,
    broadcast,
    concatenate,
    dynamic_slice,
    dynamic_update_slice,
    elementwise,
    iota,
    pad,
    random_bits,
    real_rows,
    reshape,
    select,
    slice_,
    split,
    squeeze,
    stack,
    transpose,
    unstack,
)

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
    kept = tuple(r for r in mark.rows if r.dim not in axes)
    # What stands in padding that the reduction does not see spoils nothing.
    seen = mark if amount else Mark(kept, mark.const)
    rows = tuple(replace(r, pad=_reduced_pad(pair.name, seen, r)) for r in kept)
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
                Rows(
                    dim, *layout, 0 if kept else _changed(stands, pure), any(p.data for p in known)
                )
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
            params[key][dim] == one for key, one in _PLAIN_WINDOW.items() if params.get(key)
        )
        if not plain or layout is None or len(known) != len(parts):
            return [leaking(pair.where)]
        pads = [operand_pad(m, p) for m, p in zip(marks, known, strict=True)]
        zero = (
            is_number(pads[0].pad, 0)
            and pair.name in _SUMS_OF_WINDOWS
            and not any(mark.is_wild for mark in marks)
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
        summed = _summed_products(pair, (one, one.at(a)), (two, two.at(b)))
        if summed.leak:
            return [summed]
        amount = amount or summed.amount
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
            stands = _product_pad(
                [operand_pad(marks[side], old), operand_pad(marks[1 - side], None)]
            )
            rows.append(replace(old, dim=new, pad=stands))
    return [Mark(tuple(sorted(rows, key=lambda r: r.dim)), amount=amount)]


def _summed_products(
    pair: Pair, one: tuple[Mark, Rows | None], two: tuple[Mark, Rows | None]
) -> Mark:
    """Returns what is seen of a dim of each factor in the sum over both: nothing, if it is clean."""
    left, right = one[1], two[1]
    if left is None and right is None:
        return CLEAN
    if left is None or right is None or common_layout([left, right]) is None:
        return leaking(pair.where)
    pads = [operand_pad(*one), operand_pad(*two)]
    if is_number(folded("mul", {}, pads), 0):
        return CLEAN
    certain = all(p.is_pure for p in pads)
    if (left.data or right.data) and (certain or any(isinstance(p.pad, Pad) for p in pads)):
        return leaking(pair.where, certain=certain)
    return Mark(amount=pair.where)


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
    whole = dict(
        zip([d for d in range(ndim) if d not in collapsed], numbers.offset_dims, strict=True)
    )
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
        elif dim in whole and all(
            s[dim] == shape[dim] for s, shape in zip(sizes, shapes, strict=True)
        ):
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
    places = dict(
        zip([d for d in range(ndim) if d not in inserted], windows_of_updates, strict=True)
    )
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
            outs.append(
                leaking(pair.where, certain=any(r.pad is PURE and r.data for r in mark.rows))
            )
    return outs


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
    "bitcast_convert_type", "mulhi", "log2", "one_minus_square", "polynomial",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    "select_n": select,
    "broadcast_in_dim": broadcast,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
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
