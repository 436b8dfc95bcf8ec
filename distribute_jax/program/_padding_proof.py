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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from distribute_jax._mesh import num_replicas
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program import _walk
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._jaxprs import is_literal, is_ref, open_jaxpr
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
from distribute_jax.program._padding_rules import CARRIES, RULES, on_empty_replica
from distribute_jax.program._result_rows import Unknown, share_sizes
from distribute_jax.program._trace import Call, Traced
from distribute_jax.program._walk import Marks, Rule, Walk


def prove_padding(jaxpr: Any, other: Any, shares: tuple[int, int], marks: list[Mark]) -> list[Mark]:
    """Returns the mark of each output of a step, traced with shares of two lengths."""
    outs = PaddingWalk(shares).run(Twins(jaxpr, other), marks)
    # NaN times the zeros of padding is NaN, in a place that the padding may name.
    where = "a replica without real rows"
    return [leaking(where) if out.varies_if_empty and not out.rows else out for out in outs]


class Twins(NamedTuple):
    """A jaxpr of the step, and the same one traced with another length of the shares."""

    one: Any
    other: Any


class PaddingWalk(Walk):
    """The abstract interpreter of a step, traced with shares of two lengths.

    An output is clean if it cannot depend on padding.
    """

    failures = (*Walk.failures, UndecidedError)

    def __init__(self, shares: tuple[int, int]) -> None:
        super().__init__()
        self.shares = shares

    def joined(self, eqn: Pair, one: Mark, other: Mark) -> Mark:
        return join(one, other, eqn.where)

    def decided(self, eqn: Pair, by: Mark, outs: Marks) -> Marks:
        if by.is_clean:
            outs = [_with_row_count(out, by.row_count_at) for out in outs]
            varies = by.varies_if_empty
            return [replace(out, varies_if_empty=out.varies_if_empty or varies) for out in outs]
        return [leaking(by.leak.where if by.leak else eqn.where)] * len(outs)

    def shifted(self, mark: Mark, by: int) -> Mark:
        rows = tuple(replace(r, dim=r.dim + by) for r in mark.rows)
        return replace(mark, rows=rows, index=None, column=None)

    def bodies(self, eqn: Pair, key: str = "") -> list[Twins]:
        pairs = zip(super().bodies(eqn.eqn, key), super().bodies(eqn.other, key), strict=True)
        return [Twins(*pair) for pair in pairs]

    def key(self, body: Twins) -> Any:
        return id(body.one), id(body.other)

    def outputs(self, body: Twins, marks: Marks) -> Marks:
        """Returns the marks of the outputs of a jaxpr, given those of its inputs.

        Raises:
            UndecidedError: the traces are different programs, or have refs.
        """
        one, two = map(open_jaxpr, body)
        consts = (getattr(closed, "consts", ()) for closed in body)
        env: dict[Any, Mark] = dict(zip(one.invars, marks, strict=True))
        env.update(zip(one.constvars, map(_of_constant, *consts), strict=True))
        partner = dict(zip(one.constvars + one.invars, two.constvars + two.invars, strict=True))

        def read(atom: Any, twin: Any, at: Pair | str = "a result") -> Mark:
            if is_literal(atom) and is_literal(twin):
                return _of_constant(atom.val, twin.val, at)
            if is_literal(atom) or partner.get(atom) is not twin:
                raise UndecidedError(f"{_where(at)} gets other operands")
            return env[atom]

        calls = [pair.eqn for pair in reversed(self.enclosing)]
        for eqn, twin in zip(one.eqns, two.eqns, strict=False):
            pair = Pair(eqn, twin, self.shares, calls)
            lengths = [(len(e.invars), len(e.outvars)) for e in (eqn, twin)]
            if eqn.primitive is not twin.primitive or lengths[0] != lengths[1]:
                raise UndecidedError(f"{pair.where} becomes another operation")
            pairs = zip(eqn.invars, twin.invars, strict=True)
            operands = [read(a, b, pair) for a, b in pairs]
            env.update(zip(eqn.outvars, self.applied(pair, operands), strict=True))
            partner.update(zip(eqn.outvars, twin.outvars, strict=True))
        if len(one.eqns) != len(two.eqns):
            raise UndecidedError("the step becomes another program")
        return [read(*atoms) for atoms in zip(one.outvars, two.outvars, strict=True)]

    def apply(self, pair: Pair, marks: Marks) -> Marks:
        """Returns the marks of the outputs of an equation."""
        if any(map(is_ref, [*pair.invars, *pair.outvars])):
            raise UndecidedError(f"{pair.where} reads or writes a ref")
        outs = self.by_rule(STRUCTURE.get(pair.name, _computed), pair, marks)
        outs = [leaking(pair.where)] * len(pair.outvars) if outs is None else outs
        if pair.name not in STRUCTURE and pair.name != "real_rows":
            outs = [on_empty_replica(pair, marks, out) for out in outs]
        return [_checked(pair, k, mark) for k, mark in enumerate(outs)]


def _computed(walk: PaddingWalk, pair: Pair, marks: Marks) -> Marks | None:
    """Applies the rule of a primitive without a body, and notes where the number of rows is used."""
    count = len(pair.outvars)
    chosen = pair.name == "select_n" and marks[0].const is not None
    used = [marks[0], marks[1 + int(marks[0].const)]] if chosen else marks
    row_count_at = next((mark.row_count_at for mark in used if mark.row_count_at), "")
    leaks = [mark.leak for mark in used if mark.leak]
    rule = RULES.get(pair.name)
    if leaks:
        stays = rule is not None and _carries(pair, marks)
        # Two leaks may cancel, as in x.sum() - x.sum().
        leak = Leak(leaks[0].where, leaks[0].certain and len(leaks) == 1 and stays)
        return [Mark(leak=leak, row_count_at=row_count_at)] * count
    varies = any(map(pair.varying, range(count)))
    # Clean operands give a clean result; only a number that they determine is of interest.
    if all(mark.is_clean for mark in marks) and not varies and pair.name != "select_n":
        changed = pair.changed_params()
        row_count_at = row_count_at or (pair.where if changed else "")
        if rule is None or changed or any(mark.const is None for mark in marks):
            return [Mark(row_count_at=row_count_at)] * count
    if rule is None:
        return None
    if pair.changed_params(allowed=_OF_SHAPES):
        row_count_at = row_count_at or pair.where
    outs = rule(pair, marks)
    outs = [outs] * count if isinstance(outs, Mark) else outs
    return [_with_row_count(out, row_count_at) for out in outs]


def _checked(pair: Pair, index: int, out: Mark) -> Mark:
    """Returns the mark if it has exactly the dims whose length differs, else a leak."""
    if out.index is not None and pair.outvars[index].aval.dtype.itemsize < 4:
        out = replace(out, index=None)  # it may wrap around, or be rounded
    sizes, others = pair.out(index)
    same_rank = len(sizes) == len(others)

    def fits(rows: Rows) -> bool:
        lengths = [rows.outer * rows.inner * share for share in pair.shares]
        return rows.is_uniform or [sizes[rows.dim], others[rows.dim]] == lengths

    has_dims = same_rank and [r.dim for r in out.rows] == pair.varying(index)
    return out if out.leak or (has_dims and all(map(fits, out.rows))) else leaking(pair.where)


def _of_constant(one: Any, other: Any, at: Pair | str = "a constant") -> Mark:
    if is_same(one, other):
        return Mark(const=known_number(one)) if isinstance(at, Pair) else CLEAN
    same_shape = np.shape(one) == np.shape(other)
    return Mark(row_count_at=_where(at)) if same_shape else leaking(_where(at))


def _where(at: Pair | str) -> str:
    return at if isinstance(at, str) else at.where


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
        atoms = pair.invars[0], pair.outvars[0]
        source, to = (np.dtype(atom.aval.dtype).kind for atom in atoms)
        return source in "biu" or to not in "biu"
    if pair.name == "mul" and any(mark.const == 0 for mark in marks):
        return False
    return pair.name in CARRIES


def _with_row_count(out: Mark, row_count_at: str) -> Mark:
    return replace(out, row_count_at=row_count_at) if row_count_at and not out.row_count_at else out


def scan(walk: PaddingWalk, pair: Pair, marks: Marks) -> Marks | None:
    """It cannot scan over rows."""
    same = pair.params["length"] == pair.other.params["length"]
    return _walk.scan(walk, pair, marks) if same else None


STRUCTURE: dict[str, Rule] = {
    **_walk.STRUCTURE,
    **dict.fromkeys(_walk.IDENTITIES, lambda walk, pair, marks: marks),
    "scan": scan,
}
"""The rules of identities, calls and control flow, by name."""


def padding_leaks(call: Call, entry: BoundProgram, larger: Traced | str) -> list[tuple[str, Leak]]:
    """Returns the name and leak of each output that may depend on padding.

    ``larger`` is the trace with a longer share, or why there is none. An empty name means the whole step.
    """
    if isinstance(larger, str):
        return [("", Leak(f"it could not be traced with more rows ({larger})", False))]
    traced = entry.program.traced
    writes = [(t.written, t.sizes) for t in (traced, larger)]
    if writes[0] != writes[1]:
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
