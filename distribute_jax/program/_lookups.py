"""Tables of which a worker reads the rows that its batch looks up, and hands over gradients of these.

That is for a table which the step reads by lookups alone, with indices that are computed from the batch: the
worker computes the indices first. The gradient of such a table is zero in all other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import numpy as np

from distribute_jax._user_frames import log_once
from distribute_jax.program._jaxprs import CALLS, called_body, line, opened
from distribute_jax.program._padding_rules import ELEMENTWISE
from distribute_jax.program._pieces import variables
from distribute_jax.program._rows import SUMS, Ids, Needs, Rows, takes_rows

_WORTH = 1 << 14
"""Smaller tables are read whole: to look up what is needed of them takes longer."""

_WHOLE = """\
Parameter servers send %s whole at each step, though the step looks up rows of it: it is used whole at %s."""


class Lookup(NamedTuple):
    """Rows of tables that are looked up with the same indices."""

    indices: tuple[tuple[int, bool], ...]
    """Which results of the program that computes indices they are, and whether they are clipped."""
    number: int
    """How many, at most."""
    rows: int
    """How many rows a table has."""


class Lookups:
    """What a worker reads by rows, and hands over by rows."""

    def __init__(
        self,
        eqns: Sequence[Any],
        tables: Mapping[Any, str],
        state: set[Any],
        hands: Sequence[Any],
        results: Iterable[Any],
    ) -> None:
        """Takes the equations of a worker, what it reads that may be a table, by name, and hands over.

        ``state`` is what indices may not depend on; ``results`` are handed over whole.
        """
        self.eqns, self._state = [one for eqn in eqns for one in _single(eqn)], state
        uses = {v: gathers for v in tables if (gathers := self._gathers(v))}
        whole = list(results)
        while True:
            keys = {v: (_indices(gathers), v.aval.shape[0]) for v, gathers in uses.items()}
            self.ids = {
                key: Ids(sum(prod(i.aval.shape[:-1]) for i in key[0]), Rows(0, key[1]))
                for key in dict.fromkeys(keys.values())
            }
            self.tables = {v: self.ids[key] for v, key in keys.items()}
            self.hands = {
                v: ids
                for (indices, rows), ids in self.ids.items()
                for v, left in unchanged(self.eqns, {}, indices).items()
                if left is ZERO and v in hands and v.aval.shape[:1] == (rows,)
            }
            lookups = {id(eqn): self.tables[v] for v, some in uses.items() for eqn in some}
            rest = [*whole, *(v for v in hands if v not in self.hands)]
            self.needs = Needs(self.eqns, self.hands, rest, lookups)
            wrong = [v for v in uses if v in self.needs.whole]
            for v in wrong:
                del uses[v]
                eqn = self.needs.whole[v]
                log_once(_WHOLE, tables[v], line(eqn) if eqn else "the end", about=tables[v])
            if not wrong:
                return

    def _gathers(self, table: Any) -> list[Any]:
        """Returns the equations that look up rows of a table; none if they had better read all of it."""
        same, gathers = {table}, []
        for eqn in self.eqns:
            if eqn.primitive.name == "gather" and eqn.invars[0] in same and takes_rows(eqn):
                gathers.append(eqn)
            elif eqn.primitive.name in ELEMENTWISE and same.issuperset(variables(eqn.invars)):
                same.update(eqn.outvars)
        indices, shape = _indices(gathers), table.aval.shape
        number = sum(prod(i.aval.shape[:-1]) for i in indices)
        is_worth = prod(shape) >= _WORTH and 2 * number <= shape[0]
        return gathers if is_worth and self._of_data(indices) else []

    def _of_data(self, indices: Iterable[Any]) -> bool:
        return self._state.isdisjoint(v for e in self.before(indices) for v in variables(e.invars))

    def before(self, wanted: Iterable[Any]) -> list[Any]:
        """Returns the equations that some values are computed by."""
        needed, eqns = set(wanted), []
        for eqn in reversed(self.eqns):
            if needed.intersection(eqn.outvars):
                eqns.append(eqn)
                needed.update(variables(eqn.invars))
        return eqns[::-1]

    def indices(self) -> tuple[list[Any], list[Lookup]]:
        """Returns what a worker computes before it reads, and what it takes of that for each lookup."""
        atoms = list(dict.fromkeys(v for indices, _ in self.ids for v in sorted(indices, key=id)))
        clipped = {
            e.invars[1] for e in self.eqns if takes_rows(e) and "CLIP" in str(e.params["mode"])
        }
        return atoms, [
            Lookup(tuple((atoms.index(v), v in clipped) for v in indices), ids.number, rows)
            for (indices, rows), ids in self.ids.items()
        ]


def _indices(gathers: Iterable[Any]) -> frozenset[Any]:
    return frozenset(eqn.invars[1] for eqn in gathers)


def _single(eqn: Any) -> list[Any]:
    """Returns a sum of several arrays as sums of one."""
    if eqn.primitive.name not in SUMS:
        return [eqn]
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return [eqn.replace(invars=[x], outvars=[out]) for x, out in pairs]


ZERO = object()
"""Stands for zeros in ``unchanged``."""

_KEEP_ZERO = frozenset({
    "abs", "broadcast_in_dim", "convert_element_type", "copy", "cbrt", "div", "expm1", "integer_pow",
    "log1p", "neg", "psum", "psum_invariant", "reduce_precision", "reshape", "sign", "sin", "sinh", "sqrt",
    "square", "squeeze", "tan", "tanh", "transpose",
})  # fmt: skip
"""Operations of which the result is zero where the first operand is."""


def unchanged(
    eqns: Iterable[Any], start: Mapping[Any, Any], indices: Collection[Any] = ()
) -> dict[Any, Any]:
    """Returns what values are in the rows that nobody looked up: zero, or what others ``start`` with.

    Args:
        eqns: what computes the values.
        start: what some variables are there: ``ZERO``, or whatever stands for their value.
        indices: those that equations add to rows with, which somebody looked up.
    """
    left = dict(start)
    for eqn in eqns:
        body = called_body(eqn) if eqn.primitive.name in CALLS else None
        operands = [
            (ZERO if np.ndim(v.val) == 0 and v.val == 0 else None)
            if isinstance(v, jex_core.Literal)
            else left.get(v)
            for v in eqn.invars
        ]
        if body is not None:
            inner = opened(body)
            inside = unchanged(inner.eqns, dict(zip(inner.invars, operands, strict=True)))
            outs = [
                None if isinstance(v, jex_core.Literal) else inside.get(v) for v in inner.outvars
            ]
        else:
            outs = [_left(eqn, operands, indices)]
        left.update((v, out) for v, out in zip(eqn.outvars, outs, strict=False) if out is not None)
    return left


def _left(eqn: Any, operands: Sequence[Any], indices: Collection[Any]) -> Any:
    kind, first = eqn.primitive.name, operands[0] if operands else None
    if kind in _KEEP_ZERO and first is ZERO:
        return None if kind == "integer_pow" and eqn.params["y"] <= 0 else ZERO
    if kind == "mul" and ZERO in operands:
        return ZERO
    if kind in {"add", "add_any"} and ZERO in operands:
        return operands[1] if first is ZERO else first
    if kind == "sub" and operands[1] is ZERO:
        return first
    if (
        kind in {"copy", "convert_element_type"}
        and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    ):
        return first
    if kind == "select_n" and all(case is operands[1] for case in operands[1:]):
        return operands[1]
    is_ours = kind == "scatter-add" and eqn.invars[1] in indices and takes_rows(eqn)
    return first if is_ours else None
