"""Dataflow from a variable's old value: is an output that value, that value plus something, or other?"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax.program._jaxprs import CALLS, called_body, consts_and_carries, open_jaxpr


class Relation(enum.Enum):
    """How a value depends on the old value of a variable."""

    NONE = "does not depend on it"
    SAME = "it itself, or the replica's key of it"
    PLUS = "it plus something that does not depend on it"
    OTHER = "depends on it in another way"


_NONE, _SAME, _PLUS, _OTHER = Relation

FOLD = "fold_replica_id"
"""The name of the jitted function that makes each replica's key of a stored one."""

_IDENTITIES = frozenset(
    {"copy", "mirrored", "name", "optimization_barrier", "part_of_mean", "stop_gradient"}
)
_RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""They keep every number in its place if they only add or drop dims of size 1."""


class _Dtypes(NamedTuple):
    """The dtypes of a variable before and after the step."""

    old: Any
    new: Any

    def allow_cast(self, before: Any, after: Any) -> bool:
        """True if "old plus something" is still that after a cast, except for the rounding of a sum.

        The increment is found by subtracting the old value, cast to the new dtype. So no cast on the
        way may lose more of the old value than that one does.
        """
        if jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact):
            return False  # Each replica's term would be rounded to an integer by itself.
        if jnp.issubdtype(after, jnp.bool_):
            return bool(before == after)
        return bool(after == self.new or np.can_cast(self.old, after))


def relation(jaxpr: jex_core.Jaxpr, output: int, old: int, beside: Sequence[int] = ()) -> Relation:
    """Returns how an output depends on the input ``old``, which holds its old value.

    ``beside`` are the inputs with other parts of the same variable, which must not contribute.
    """
    result = _relation(jaxpr, output, old, beside)
    return _PLUS if result is _SAME else result


def is_unchanged(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """True if an output is an input, or the replica's key of it, on every path; False if unsure."""
    return _relation(jaxpr, output, old) is _SAME


def is_sum_of_old(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """True if an output is a sum over the replicas of its old value plus something."""
    var: Any = jaxpr.outvars[output]
    eqn = next((eqn for eqn in jaxpr.eqns if any(out is var for out in eqn.outvars)), None)
    if eqn is None or eqn.primitive.name != "psum":
        return False
    operand = eqn.invars[eqn.outvars.index(var)]
    inside = jaxpr.replace(outvars=[operand])
    return relation(inside, 0, old) is _PLUS


def _relation(jaxpr: Any, output: int, old: int, beside: Sequence[int] = ()) -> Relation:
    start = [_OTHER if i in beside else _NONE for i in range(len(jaxpr.invars))]
    start[old] = _SAME
    before, after = jaxpr.invars[old].aval, jaxpr.outvars[output].aval
    result = _run(jaxpr, start, _Dtypes(before.dtype, after.dtype))[output]
    return _OTHER if result is _PLUS and before.shape != after.shape else result


def _run(body: Any, inputs: Sequence[Relation], dtypes: _Dtypes) -> list[Relation]:
    jaxpr = open_jaxpr(body)
    env: dict[Any, Relation] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Relation:
        return _NONE if isinstance(atom, jex_core.Literal) else env.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(atom) for atom in eqn.invars], dtypes)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation]:
    if all(r is _NONE for r in operands):
        return [_NONE] * len(eqn.outvars)
    outs = _structural(eqn, operands, dtypes)
    if outs is None:
        outs = [_PLUS if _is_plus(eqn, operands, dtypes) else _OTHER]
    return outs if len(outs) == len(eqn.outvars) else [_OTHER] * len(eqn.outvars)


def _structural(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation] | None:
    """Returns the relations after an identity, call, branch or loop; None for other equations."""
    name = eqn.primitive.name
    if name in _IDENTITIES:
        return operands
    if eqn.params.get("name") == FOLD:
        return [_SAME if _SAME in operands else _OTHER]
    if name == "scan":
        return _scan(eqn, operands, dtypes)
    if name == "cond" and operands[0] is _NONE:
        branches = [_run(branch, operands[1:], dtypes) for branch in eqn.params["branches"]]
        return [_joined(*each) for each in zip(*branches, strict=True)]
    body = called_body(eqn) if name in CALLS else None
    return None if body is None else _run(body, operands, dtypes)


def _joined(*relations: Relation) -> Relation:
    """Returns the relation of a value that is one of several."""
    kinds = set(relations)
    if len(kinds) == 1:
        return relations[0]
    return _PLUS if kinds == {_SAME, _PLUS} else _OTHER


def _is_plus(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> bool:
    name = eqn.primitive.name
    plus = [r in (_SAME, _PLUS) for r in operands]
    none = [r is _NONE for r in operands]
    if name == "convert_element_type":
        return plus[0] and dtypes.allow_cast(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
    if name in _RESHAPES:
        return plus == [True] and _keeps_places(eqn)
    if name in ("add", "add_any"):
        return any(plus) and any(none)
    if name in ("sub", "scatter-add"):
        return plus[0] and all(none[1:])
    return name == "select_n" and none[0] and all(plus[1:])


def _keeps_places(eqn: Any) -> bool:
    """True if the dims above size 1 stay the same, in the same order."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return False  # it transposes as well
    old, new = ([n for n in var.aval.shape if n != 1] for var in (eqn.invars[0], eqn.outvars[0]))
    return old == new


def _scan(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation] | None:
    """Iterates the carries to a fixed point; a stacked output is related to the slices at its own index."""
    body = eqn.params["jaxpr"]
    start, num_carry = consts_and_carries(eqn)
    if start < 0:
        return None
    consts, scanned = operands[:start], operands[start + num_carry :]
    carries = operands[start : start + num_carry]
    while True:
        outs = _run(body, [*consts, *carries, *map(_moved, scanned)], dtypes)
        grown = [_joined(*each) for each in zip(carries, outs, strict=False)]
        if grown == carries:
            break
        carries = grown
    stacked = list(map(_moved, outs[num_carry:]))
    if any(r is not _NONE for r in scanned):
        stacked = _run(body, [*map(_moved, consts + carries), *scanned], dtypes)[num_carry:]
    return carries + stacked


def _moved(relation: Relation) -> Relation:
    """Returns the relation of a value that is not in the old value's place."""
    return _NONE if relation is _NONE else _OTHER
