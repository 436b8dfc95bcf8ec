"""The padding proof: which outputs of a padded step cannot depend on the padding.

The step is traced twice, with shares of two lengths. An abstract interpreter of both jaxprs, side by
side, finds which dims have rows: those whose length differs. Each value gets a mark that says what may be
in the padding of these dims: zero after ``where(mask, x, 0)``, for example. A reduction over rows is clean
if their padding is neutral, else it is a leak. A number that differs between the two jaxprs was computed
from the length of the share, which counts padding.

What the interpreter does not know may leak, so a missing rule never makes a false proof. Two things are
assumed: that zero times what a real row could have is zero, since padding repeats real rows; and that
random bits may depend on how many are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distribute_jax._mesh import num_replicas
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._jaxprs import (
    CALLS,
    called_body,
    consts_and_carries,
    is_literal,
    is_ref,
    open_jaxpr,
)
from distribute_jax.program._padding_marks import (
    CLEAN,
    Leak,
    Mark,
    Pair,
    Rows,
    UndecidedError,
    is_same,
    join,
    known_number,
    leaking,
)
from distribute_jax.program._padding_rules import CARRIES, RULES
from distribute_jax.program._result_rows import Unknown, share_sizes
from distribute_jax.program._trace import Call, Traced


class RefsError(UndecidedError):
    """The program has refs, through which values may flow anywhere."""


def prove_padding(jaxpr: Any, other: Any, shares: tuple[int, int], marks: list[Mark]) -> list[Mark]:
    """Returns the mark of each output of a step, traced with shares of two lengths."""
    return PaddingWalk(shares).run(jaxpr, other, marks)


_FAILURES = (UndecidedError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a rule for a form of the equation that it does not know, as of another JAX version."""


class PaddingWalk:
    """The abstract interpreter of a step, traced with shares of two lengths.

    An output is clean if it cannot depend on padding.
    """

    def __init__(self, shares: tuple[int, int]) -> None:
        self.shares = shares
        # Values hold the bodies, so that no id is reused.
        self._cache: dict[Any, tuple[Any, Any, list[Mark]]] = {}

    def run(self, body: Any, other: Any, marks: Sequence[Mark]) -> list[Mark]:
        """Returns the marks of the outputs of a jaxpr, given those of its inputs.

        Raises:
            UndecidedError: the traces are different programs, or have refs.
        """
        key = id(body), id(other), tuple(marks)
        if key not in self._cache:
            self._cache[key] = body, other, self._run(body, other, marks)
        return self._cache[key][2]

    def _run(self, body: Any, other: Any, marks: Sequence[Mark]) -> list[Mark]:
        one, two = open_jaxpr(body), open_jaxpr(other)
        consts = (getattr(closed, "consts", ()) for closed in (body, other))
        env: dict[Any, Mark] = dict(zip(one.invars, marks, strict=True))
        env.update(zip(one.constvars, map(_constant, *consts), strict=True))
        partner = dict(zip(one.constvars + one.invars, two.constvars + two.invars, strict=True))

        def read(pair: Pair, atom: Any, twin: Any) -> Mark:
            if is_literal(atom) and is_literal(twin):
                return _literal(pair, atom.val, twin.val)
            if is_literal(atom) or partner.get(atom) is not twin:
                raise UndecidedError(f"{pair.where} gets other operands")
            return env[atom]

        for eqn, twin in zip(one.eqns, two.eqns, strict=False):
            pair = Pair(eqn, twin, self.shares)
            lengths = [(len(e.invars), len(e.outvars)) for e in (eqn, twin)]
            if eqn.primitive is not twin.primitive or lengths[0] != lengths[1]:
                raise UndecidedError(f"{pair.where} becomes another operation")
            operands = [read(pair, a, b) for a, b in zip(eqn.invars, twin.invars, strict=True)]
            env.update(zip(eqn.outvars, self.apply(pair, operands), strict=True))
            partner.update(zip(eqn.outvars, twin.outvars, strict=True))
        if len(one.eqns) != len(two.eqns):
            raise UndecidedError("the step becomes another program")
        end = Pair(None, None, self.shares)
        return [read(end, a, b) for a, b in zip(one.outvars, two.outvars, strict=True)]

    def apply(self, pair: Pair, marks: list[Mark]) -> list[Mark]:
        """Returns the marks of the outputs of an equation."""
        if any(map(is_ref, [*pair.eqn.invars, *pair.eqn.outvars])):
            raise RefsError(f"{pair.where} reads or writes a ref")
        rule, count = STRUCTURE.get(pair.name), len(pair.eqn.outvars)
        try:
            marks = rule(self, pair, marks) if rule else _computed(pair, marks)
        except RefsError:
            raise
        except _FAILURES:
            marks = []
        if len(marks) != count:
            marks = [leaking(pair.where)] * count
        return [_checked(pair, k, mark) for k, mark in enumerate(marks)]


def _computed(pair: Pair, marks: list[Mark]) -> list[Mark]:
    """Applies the rule of a primitive without a body, and notes where the number of rows is used."""
    count = len(pair.eqn.outvars)
    chosen = pair.name == "select_n" and marks[0].const is not None
    used = [marks[0], marks[1 + int(marks[0].const)]] if chosen else marks
    row_count_at = next((mark.row_count_at for mark in used if mark.row_count_at), "")
    leaks = [mark.leak for mark in used if mark.leak]
    rule = RULES.get(pair.name)
    if leaks:
        stays = rule is not None and _carries(pair, marks)
        leak = Leak(leaks[0].where, leaks[0].certain and len(leaks) == 1 and stays)
        return [Mark(leak=leak, row_count_at=row_count_at)] * count
    varies = any(map(pair.varying, range(count)))
    if all(mark.is_clean for mark in marks) and not varies and pair.name != "select_n":
        changed = pair.changed_params()
        row_count_at = row_count_at or (pair.where if changed else "")
        if rule is None or changed or any(mark.const is None for mark in marks):
            return [Mark(row_count_at=row_count_at)] * count
    if rule is None:
        return []
    if pair.changed_params(allowed=_OF_SHAPES):
        row_count_at = row_count_at or pair.where
    outs = rule(pair, marks)
    outs = [outs] * count if isinstance(outs, Mark) else outs
    return [_with_row_count(out, row_count_at) for out in outs]


def _checked(pair: Pair, index: int, out: Mark) -> Mark:
    """Returns the mark if it has exactly the dims whose length differs, else a leak."""
    sizes, others = pair.out(index)
    same_rank = len(sizes) == len(others)

    def fits(rows: Rows) -> bool:
        lengths = [rows.outer * rows.inner * share for share in pair.shares]
        return rows.is_uniform or [sizes[rows.dim], others[rows.dim]] == lengths

    has_dims = same_rank and [r.dim for r in out.rows] == pair.varying(index)
    return out if out.leak or (has_dims and all(map(fits, out.rows))) else leaking(pair.where)


def _constant(one: Any, other: Any) -> Mark:
    if is_same(one, other):
        return CLEAN
    try:
        same_shape = np.asarray(one).shape == np.asarray(other).shape
    except (TypeError, ValueError):  # such as keys
        same_shape = False
    return Mark(row_count_at="a constant") if same_shape else leaking("a constant")


def _literal(pair: Pair, one: Any, other: Any) -> Mark:
    number = known_number(one)
    if number is not None and number == known_number(other):
        return Mark(const=number)
    return CLEAN if is_same(one, other) else Mark(row_count_at=pair.where)


_OF_SHAPES = frozenset({
    "shape", "new_sizes", "sizes", "slice_sizes", "start_indices", "limit_indices",
    "padding_config", "sharding", "out_sharding",
})  # fmt: skip
"""Parameters that follow the shapes; rules check them."""


def _carries(pair: Pair, marks: Sequence[Mark]) -> bool:
    """True if a leak of one operand certainly reaches the result."""
    if pair.name == "select_n":
        which, *cases = marks
        seen = [k for k, case in enumerate(cases) if case.leak]
        return any(r.pad.number is (seen != [1]) for r in which.rows) and not which.leak
    if pair.name == "convert_element_type":
        atoms = pair.eqn.invars[0], pair.eqn.outvars[0]
        source, to = (np.dtype(atom.aval.dtype).kind for atom in atoms)
        return source in "biu" or to not in "biu"
    if pair.name == "mul" and any(mark.const == 0 for mark in marks):
        return False
    return pair.name in CARRIES


def _with_row_count(out: Mark, row_count_at: str) -> Mark:
    return replace(out, row_count_at=row_count_at) if row_count_at and not out.row_count_at else out


# Calls, branches and loops

Structure = Callable[[PaddingWalk, Pair, list[Mark]], list[Mark]]


def call(walk: PaddingWalk, pair: Pair, marks: list[Mark]) -> list[Mark]:
    """The body runs once, on the operands."""
    return walk.run(called_body(pair.eqn), called_body(pair.other), marks)


def cond(walk: PaddingWalk, pair: Pair, marks: list[Mark]) -> list[Mark]:
    """Every output depends on the predicate."""
    index, *operands = marks
    if not index.is_clean:
        return [_decided(pair, index)] * len(pair.eqn.outvars)
    branches = zip(pair.eqn.params["branches"], pair.other.params["branches"], strict=True)
    first, *others = (walk.run(one, two, operands) for one, two in branches)
    for outs in others:
        first = _joined(pair, first, outs)
    return [_with_row_count(out, index.row_count_at) for out in first]


def _joined(pair: Pair, marks: Sequence[Mark], others: Sequence[Mark]) -> list[Mark]:
    return [join(a, b, pair.where) for a, b in zip(marks, others, strict=False)]


def _decided(pair: Pair, decides: Mark) -> Mark:
    """Returns the mark of the outputs if the deciding value may depend on padding."""
    return leaking(decides.leak.where if decides.leak else pair.where)


def scan(walk: PaddingWalk, pair: Pair, marks: list[Mark]) -> list[Mark]:
    """The body is interpreted until the marks of the carries stop changing; it cannot scan over rows."""
    body, other = pair.eqn.params["jaxpr"], pair.other.params["jaxpr"]
    start, num_carry = consts_and_carries(pair.eqn)
    if start < 0 or pair.eqn.params["length"] != pair.other.params["length"]:
        return []
    scanned = [_shifted(mark, -1) for mark in marks[start + num_carry :]]
    carries = marks[start : start + num_carry]
    while True:
        outs = walk.run(body, other, [*marks[:start], *carries, *scanned])
        grown = _joined(pair, carries, outs)
        if grown == carries:
            return carries + [_shifted(out, 1) for out in outs[num_carry:]]
        carries = grown


def _shifted(mark: Mark, by: int) -> Mark:
    """Returns the mark of an array with one leading dim more, or less."""
    rows = tuple(replace(r, dim=r.dim + by) for r in mark.rows)
    return replace(mark, rows=rows, index=None, column=None)


def while_loop(walk: PaddingWalk, pair: Pair, marks: list[Mark]) -> list[Mark]:
    """The carries are known if the trip count does not depend on rows."""
    one, two = pair.eqn.params, pair.other.params
    tests = one["cond_nconsts"]
    start = tests + one["body_nconsts"]
    carries = marks[start:]
    while True:
        [more] = walk.run(one["cond_jaxpr"], two["cond_jaxpr"], [*marks[:tests], *carries])
        if not more.is_clean:
            return [_decided(pair, more)] * len(carries)
        outs = walk.run(one["body_jaxpr"], two["body_jaxpr"], [*marks[tests:start], *carries])
        grown = _joined(pair, carries, outs)
        if grown == carries:
            return [_with_row_count(mark, more.row_count_at) for mark in carries]
        carries = grown


_IDENTITIES = (
    *("optimization_barrier", "mirrored", "unreduced", "device_put", "name", "reshard"),
    *("part_of_mean", "sharding_constraint"),
)

STRUCTURE: dict[str, Structure] = {
    **dict.fromkeys(CALLS, call),
    **dict.fromkeys(_IDENTITIES, lambda walk, pair, marks: marks),
    "cond": cond,
    "scan": scan,
    "while": while_loop,
}
"""The rules of identities, calls and control flow, by name."""


def padding_leaks(call: Call, entry: BoundProgram, larger: Traced | str) -> list[tuple[str, Leak]]:
    """Returns the name and leak of each output that may depend on padding.

    ``larger`` is the trace with a longer share, or why there is none. An empty name means the whole step.
    """
    if isinstance(larger, str):
        return [("", Leak(f"it could not be traced with more rows ({larger})", False))]
    traced = entry.program.traced
    if _writes(traced) != _writes(larger):
        return [("", Leak("with more rows it writes other variables", False))]
    variables, arrays, _, counts = traced.sizes
    joined = (isinstance(v, PerReplica) and v.layout is Layout.JOINED for v in call.arguments.data)
    data = [Mark((Rows(0),)) if is_joined else CLEAN for is_joined in joined]
    inputs = [CLEAN] * (variables + arrays) + data + [CLEAN] * counts
    try:
        marks = prove_padding(traced.jaxpr, larger.jaxpr, share_sizes(call), inputs)
    except UndecidedError as error:
        return [("", Leak(str(error), False))]
    names = entry.output_names()
    leaks = ((names[k], _leak_of(call, entry, k, mark)) for k, mark in enumerate(marks))
    return [(name, leak) for name, leak in leaks if leak is not None]


def _writes(traced: Traced) -> Any:
    return traced.written, traced.written_sizes, traced.sizes


def _leak_of(call: Call, entry: BoundProgram, output: int, mark: Mark) -> Leak | None:
    """Returns why an output may depend on padding, None if it cannot."""
    result = output - entry.state_size
    rows = False if result < 0 else (entry.program.per_example or ())[result]
    if isinstance(rows, Unknown):
        return None  # reading it is an error
    if mark.leak is not None:
        return mark.leak
    if mark.row_count_at:
        return Leak(f"the number of rows of a share, at {mark.row_count_at}", False)
    if not mark.rows:
        return None
    if rows is not False and [r.dim for r in mark.rows] == [0]:
        [along] = mark.rows
        can_be_cut = along.is_uniform or (along.outer, along.inner) == (1, 1)
        mirrored = entry.program.plan.mirrored[result] and num_replicas(call.mesh) > 1
        if can_be_cut and not (mirrored and along.data):
            return None
    return Leak("all rows of a share", False)
