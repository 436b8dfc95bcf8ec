"""How a value of a traced step depends on the old value of a variable: unchanged, added to, or otherwise."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax.program._jaxprs import CALLS, called_body, consts_and_carries, open_jaxpr


class Relation(enum.Enum):
    """What a value has to do with the old value of a variable."""

    NONE = "does not depend on it"
    SAME = "it itself, or the replica's key of it"
    PLUS = "it plus something that does not depend on it"
    OTHER = "depends on it in another way"


_NONE, _SAME, _PLUS, _OTHER = Relation

FOLD = "fold_replica_id"
"""The name of the jitted function that makes each replica's key of a stored one."""

_KEEPING = frozenset(
    {"copy", "mirrored", "name", "optimization_barrier", "part_of_mean", "stop_gradient"}
)
"""Operations that return their operands."""

_NEW_DIMS = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""Operations that keep a number's place if they only add or drop dims of size 1."""


class _Dtypes(NamedTuple):
    """The dtypes that a variable has before the step and after it."""

    old: Any
    new: Any

    def keep(self, before: Any, after: Any) -> bool:
        """Whether a cast leaves ``old plus something`` what it is, but for the rounding of a sum.

        On its way the old value may lose no more than in a cast straight to the new dtype, which is
        what the old value is cast to before it is subtracted.
        """
        if jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact):
            return False  # Rounding to integers: the parts of a sum are rounded one by one.
        if jnp.issubdtype(after, jnp.bool_):
            return bool(before == after)
        return bool(after == self.new or np.can_cast(self.old, after))


def relation(jaxpr: jex_core.Jaxpr, output: int, old: int, beside: Sequence[int] = ()) -> Relation:
    """Returns what an output of a program has to do with the input ``old`` that holds its old value.

    ``beside`` are the inputs with the other parts of the same variable, which are not to come in.
    """
    result = _relation(jaxpr, output, old, beside)
    return _PLUS if result is _SAME else result


def is_unchanged(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """Whether an output is an input, or the replica's key of it, on every path; False where unsure."""
    return _relation(jaxpr, output, old) is _SAME


def is_sum_of_old(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """Whether an output is a sum over the replicas of its old value plus something."""
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
    outs = _passed_on(eqn, operands, dtypes)
    if outs is None:
        outs = [_PLUS if _is_plus(eqn, operands, dtypes) else _OTHER]
    return outs if len(outs) == len(eqn.outvars) else [_OTHER] * len(eqn.outvars)


def _passed_on(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation] | None:
    """Returns what comes out of an equation that passes values on; None for one that computes."""
    name = eqn.primitive.name
    if name in _KEEPING:
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
    """Returns what a value is that is one of several."""
    kinds = set(relations)
    if len(kinds) == 1:
        return relations[0]
    return _PLUS if kinds == {_SAME, _PLUS} else _OTHER


def _is_plus(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> bool:
    name = eqn.primitive.name
    plus = [r in (_SAME, _PLUS) for r in operands]
    none = [r is _NONE for r in operands]
    if name == "convert_element_type":
        return plus[0] and dtypes.keep(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
    if name in _NEW_DIMS:
        return plus == [True] and _keeps_places(eqn)
    if name in ("add", "add_any"):
        return any(plus) and any(none)
    if name in ("sub", "scatter-add"):
        return plus[0] and all(none[1:])
    return name == "select_n" and none[0] and all(plus[1:])


def _keeps_places(eqn: Any) -> bool:
    """Returns whether the dims above size 1 stay the same, in the same order."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return False  # A transpose and a reshape in one.
    old, new = ([n for n in var.aval.shape if n != 1] for var in (eqn.invars[0], eqn.outvars[0]))
    return old == new


def _scan(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation] | None:
    """A carry is what every round leaves; what a round makes of a scanned slice is stacked in its place."""
    body = eqn.params["jaxpr"]
    start, num_carry = consts_and_carries(eqn)
    if start < 0:
        return None
    consts, scanned = operands[:start], operands[start + num_carry :]
    carries = operands[start : start + num_carry]
    while True:
        outs = _run(body, [*consts, *carries, *map(_other, scanned)], dtypes)
        grown = [_joined(*each) for each in zip(carries, outs, strict=False)]
        if grown == carries:
            break
        carries = grown
    stacked = list(map(_other, outs[num_carry:]))
    if any(r is not _NONE for r in scanned):
        stacked = _run(body, [*map(_other, consts + carries), *scanned], dtypes)[num_carry:]
    return carries + stacked


def _other(relation: Relation) -> Relation:
    """Returns what a value is in another place than that of the old value."""
    return _NONE if relation is _NONE else _OTHER
