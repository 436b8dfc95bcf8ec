"""Marks of the padding proof: which dims of a value have rows, and what is in their padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr

from distribute_jax.program._jaxprs import ClosedJaxpr, line, name, user_line
from distribute_jax.program._walk import COMPARISONS


class UndecidedError(Exception):
    """It cannot be decided where the padding goes; the text says at which operation, if that is known."""


class Pad(NamedTuple):
    """What is known of the entries in the padding of a value, along a dim or of an operand."""

    number: Any = None
    """The number that all of them are, if it is known."""
    is_finite: bool = True
    """Whether they are finite numbers, if real rows and weights are."""
    is_pure: bool = False
    """Whether they are what the same function computes for a real row, since padding repeats real rows."""


PURE, FINITE, ANY = Pad(is_pure=True), Pad(), Pad(is_finite=False)


def known_pad(number: Any, *, is_pure: bool = False) -> Pad:
    """Returns padding that is a number."""
    return Pad(number, bool(np.isfinite(number)), is_pure)


def computed_pad(pads: Sequence[Pad], number: Any = None) -> Pad:
    """Returns the padding after a function that is finite for finite operands, or has this result."""
    is_pure = all(pad.is_pure for pad in pads)
    if number is not None:
        return known_pad(number, is_pure=is_pure)
    return Pad(None, is_pure or all(pad.is_finite for pad in pads), is_pure)


def join_pads(pads: Sequence[Pad]) -> Pad:
    """Returns the padding of a value whose entries are each that of one of the operands."""
    number = pads[0].number
    return computed_pad(pads, number if all(pad.number == number for pad in pads) else None)


@dataclass(frozen=True)
class Rows:
    """A dim whose entries belong to rows of the share; those of real rows depend on no padding.

    Entry ``j`` belongs to row ``j // inner % share``, and the dim has ``outer * share * inner`` entries.
    """

    dim: int
    outer: int = 1
    """0 if the entries do not differ along the dim, so that every layout is right."""
    inner: int = 1
    pad: Pad = PURE
    data: bool = True
    """Whether the entries depend on the batch, rather than on their index only."""

    @property
    def is_uniform(self) -> bool:
        """True if the entries do not differ along the dim."""
        return self.outer == 0


@dataclass(frozen=True)
class Leak:
    """Why a value may depend on the padding."""

    where: str
    """The operation that mixes the rows, and its line."""
    certain: bool
    """Whether some padding certainly changes the value."""


@dataclass(frozen=True)
class Mark:
    """What is known of a value."""

    rows: tuple[Rows, ...] = ()
    """Every dim whose length depends on the share. With none the value is clean: it depends neither on
    padding nor on the number of rows."""
    const: Any = None
    """The number that all entries are, if it is known."""
    index: int | None = None
    """The dim of rows along which each entry is its own index, as of ``iota``."""
    column: tuple[int, int] | None = None
    """The position in the last dim where each entry is its index along a dim of rows, and that dim."""
    row_count_at: str = ""
    """Where the number of rows, rather than of real examples, was used; empty if it was not."""
    leak: Leak | None = None
    empty: Pad = PURE
    """What is known of the entries on a replica without real rows, where a maximum may be infinite and a
    mean NaN, if they are no constant."""
    varies_if_empty: bool = False
    """Whether on such a replica entries that may be NaN depend on the padding."""

    def at(self, dim: int) -> Rows | None:
        """Returns the rows of a dim, None if it has none."""
        return next((rows for rows in self.rows if rows.dim == dim), None)

    @property
    def may_be_nonfinite(self) -> bool:
        """True if padding may be NaN or infinite where real rows are not."""
        return self.const is None and not all(r.pad.is_finite for r in self.rows)

    @property
    def if_empty(self) -> Pad:
        """What is known of the entries on a replica without real rows."""
        return self.empty if self.const is None else known_pad(self.const, is_pure=True)

    @property
    def is_clean(self) -> bool:
        """True if the value cannot depend on padding."""
        return not (self.rows or self.leak)


CLEAN = Mark()


def leaking(where: str, *, certain: bool = False) -> Mark:
    """Returns the mark of a value that may depend on the padding."""
    return Mark(leak=Leak(where, certain))


def operand_pad(mark: Mark, rows: Rows | None) -> Pad:
    """Returns the padding of an operand along a dim; ``rows`` is None if the operand lacks the dim."""
    if mark.const is not None:
        return known_pad(mark.const, is_pure=True)
    pad = PURE if rows is None else rows.pad
    # The padding of another dim may make it not finite.
    return pad if pad.number is not None else pad._replace(is_finite=not mark.may_be_nonfinite)


Operand = tuple[Mark, Rows | None]
"""A mark, and the rows of one of its dims."""


def aligned_rows(
    dim: int,
    operands: Sequence[Operand],
    pad: Callable[[list[Pad]], Pad] = join_pads,
    *,
    everywhere: bool = True,
) -> Rows:
    """Returns the rows of a dim if entry ``j`` is computed from entry ``j`` of each operand.

    Each operand comes with its rows along that dim, which it may lack unless they are needed
    ``everywhere``. ``pad`` computes the padding.
    """
    known = [rows for _, rows in operands if rows is not None]
    layouts = {(r.outer, r.inner) for r in known if not r.is_uniform}
    if len(layouts) > 1 or (everywhere and len(known) < len(operands)):
        raise UndecidedError("rows are not aligned")
    outer, inner = layouts.pop() if layouts else (0, 0)
    pads = [operand_pad(*operand) for operand in operands]
    return Rows(dim, outer, inner, pad(pads), any(r.data for r in known))


def join(one: Mark, other: Mark, where: str) -> Mark:
    """Returns the mark of a value that is one of two."""
    if one == other:
        return one
    row_count_at = one.row_count_at or other.row_count_at
    if leak := one.leak or other.leak:
        return Mark(leak=replace(leak, certain=False), row_count_at=row_count_at)
    dims = sorted({r.dim for r in one.rows + other.rows})
    try:
        rows = tuple(aligned_rows(d, [(one, one.at(d)), (other, other.at(d))]) for d in dims)
    except UndecidedError:
        return leaking(where)
    const = one.const if one.const == other.const else None
    empty = join_pads([one.if_empty, other.if_empty])
    varies = one.varies_if_empty or other.varies_if_empty
    return Mark(rows, const, row_count_at=row_count_at, empty=empty, varies_if_empty=varies)


def known_number(value: Any) -> Any:
    """Returns a scalar as a Python number or bool, None for NaN and anything else."""
    try:
        array = np.asarray(value)
        if array.ndim or array.dtype.kind == "c":
            return None
        number = array.item() if array.dtype.kind in "biuf" else float(array)
    except (TypeError, ValueError):
        return None
    return number if number == number else None


_COMPUTE: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1,
    "sqrt": np.sqrt, "square": np.square, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "is_finite": np.isfinite,
    "rsqrt": lambda x: 1 / np.sqrt(x), "copy": lambda x: x,
    "reduce_precision": lambda x: None if x else x,  # only 0 surely stays
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "max": np.maximum, "min": np.minimum, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "real": lambda x: x,
}  # fmt: skip

BOOLEAN = COMPARISONS | {"is_finite", "not", "and", "or", "xor"}
"""Their results are never NaN."""

_TOTAL = frozenset({
    "add", "add_any", "sub", "mul", "neg", "abs", "sign", "floor", "ceil", "round", "max", "min",
    "tanh", "sin", "cos", "logistic", "erf", "square",
    "convert_element_type", "clamp", "atan2", "erfc", "atan", "asinh",
})  # fmt: skip
"""They are finite for finite operands."""

_NEUTRAL = {"div": 1, "max": -math.inf, "min": math.inf}
"""The number that does not change the other operand, which finite operands alone would not tell."""


def evaluate(name: str, numbers: Sequence[Any], pair: Pair | None = None) -> Any:
    """Computes an operation on known numbers, in the dtypes of an equation; None if it is not known how."""
    with np.errstate(all="ignore"):
        try:
            if pair is not None:  # in which numbers may overflow, wrap and be rounded
                numbers = [np.asarray(n, pair.dtype(k)) for k, n in enumerate(numbers)]
            return known_number(_computed(name, pair.params if pair else {}, numbers))
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None


def _computed(name: str, params: Mapping[str, Any], numbers: Sequence[Any]) -> Any:
    first = numbers[0]
    if name == "convert_element_type":
        to = np.dtype(params["new_dtype"])
        truncates = to.kind in "iu" and first.dtype.kind not in "biu"
        return to.type(int(first)) if truncates else first.astype(to)
    if name == "integer_pow":
        return first ** params["y"]
    if name == "div" and first.dtype.kind in "iu":
        size = abs(int(first)) // abs(int(numbers[1]))
        return first.dtype.type(size if (first < 0) == (numbers[1] < 0) else -size)
    return _COMPUTE[name](*numbers)


def elementwise_pad(name: str, pads: Sequence[Pad], pair: Pair | None = None) -> Pad:
    """Returns the padding of the result of an elementwise operation."""
    numbers = [pad.number for pad in pads]
    number = None if None in numbers else evaluate(name, numbers, pair)
    number = _absorbed(name, pads) if number is None else number
    if number is not None or all(pad.is_pure for pad in pads):
        return computed_pad(pads, number)
    for k in (0,) if name == "div" else (0, 1):
        if name in _NEUTRAL and numbers[1 - k] == _NEUTRAL[name]:  # which real rows need not have
            return pads[k]._replace(is_pure=False)
    total = name in _TOTAL or (name == "integer_pow" and pair and pair.params["y"] >= 0)
    return Pad(is_finite=name in BOOLEAN or bool(total and all(pad.is_finite for pad in pads)))


def _absorbed(name: str, pads: Sequence[Pad]) -> Any:
    """Returns the result if one operand alone decides it, as zero does in a product; else None."""
    if name in ("and", "or"):
        decides = name == "or"
        return decides if any(pad.number is decides for pad in pads) else None
    finite = [pad.is_finite for pad in pads]
    if name == "mul" and any(pad.number == 0 for pad in pads) and all(finite):
        return 0
    if name == "div" and pads[0].number == 0 and pads[1] == PURE:
        return 0
    if name in ("add", "add_any", "sub"):
        for k, pad in enumerate(pads):
            if pad.number in (math.inf, -math.inf) and all(finite[:k] + finite[k + 1 :]):
                return -pad.number if name == "sub" and k == 1 else pad.number
    return None


_IDENTITY_ELEMENTS = {"reduce_sum": 0, "reduce_prod": 1, "reduce_or": 0, "reduce_xor": 0}


def is_neutral(name: str, number: Any, dtype: Any) -> bool:
    """True if entries that are this number do not change a reduction; False for None."""
    if number is None:
        return False
    if name == "reduce_and":
        return bool(number == ~np.zeros((), dtype))
    if name in ("reduce_max", "reduce_min"):
        kind = np.dtype(dtype).kind
        ends: Any = (False, True) if kind == "b" else (-math.inf, math.inf)
        if kind in "iu":
            ends = np.iinfo(dtype).min, np.iinfo(dtype).max
        return bool(number <= ends[0] if name == "reduce_max" else number >= ends[1])
    return bool(number == _IDENTITY_ELEMENTS.get(name))


Shape = tuple[int, ...]


class Pair:
    """An equation of the step, and the same equation traced with another length of the shares."""

    def __init__(self, eqn: Any, other: Any, shares: tuple[int, int], calls: Sequence[Any]) -> None:
        """``calls`` are the equations in whose bodies it is, innermost first."""
        self.eqn, self.other, self.shares, self.calls = eqn, other, shares, calls
        self.params, self.invars, self.outvars = eqn.params, eqn.invars, eqn.outvars
        self.name: str = eqn.primitive.name

    @functools.cached_property
    def where(self) -> str:
        """The operation and the user's line, which is that of a call if JAX itself traced the function."""
        at = next(filter(None, map(user_line, [self.eqn, *self.calls])), "")
        return f"{name(self.eqn)} at {at or line(self.eqn)}"

    def operand(self, index: int) -> tuple[Shape, Shape]:
        return _shape(self.invars[index]), _shape(self.other.invars[index])

    def out(self, index: int = 0) -> tuple[Shape, Shape]:
        """Returns both shapes of an output."""
        return _shape(self.outvars[index]), _shape(self.other.outvars[index])

    def dtype(self, index: int = 0) -> Any:
        return self.invars[index].aval.dtype

    def varying(self, index: int = 0) -> list[int]:
        """Returns the dims of an output whose length depends on the share."""
        return [d for d, (a, b) in enumerate(zip(*self.out(index), strict=True)) if a != b]

    def both(self, key: str) -> tuple[Any, Any]:
        """Returns both values of a parameter."""
        return self.params[key], self.other.params[key]

    def dims(self, key: str) -> set[int]:
        """Returns the dims in a parameter of one or several."""
        dims = self.params[key]
        return set(map(int, dims if isinstance(dims, tuple) else (dims,)))

    def changed_params(self, allowed: Collection[str] = ()) -> bool:
        """True if a parameter other than those allowed differs."""
        others = (item for item in self.params.items() if item[0] not in allowed)
        return not all(is_same(value, self.other.params.get(key)) for key, value in others)


def _shape(atom: Any) -> Shape:
    return tuple(getattr(atom.aval, "shape", ()))


def is_same(one: Any, other: Any) -> bool:
    """True if two parameters or constants are equal; NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, (Jaxpr, ClosedJaxpr)):
        return str(one) == str(other)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    try:
        a, b = np.asarray(one), np.asarray(other)
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    except (TypeError, ValueError):
        return False


Rule = Callable[[Pair, list[Mark]], "Mark | list[Mark]"]
