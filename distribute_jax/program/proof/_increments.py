"""Is a new value the old one plus something? Only then can what the replicas added be summed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

from distribute_jax.program.proof._marks import ClosedJaxpr, num_scanned


class Relation(enum.Enum):
    """What a value has to do with the old value of a variable."""

    NONE = "does not depend on it"
    PLUS = "it plus something that does not depend on it"
    OTHER = "depends on it in another way"


_NONE, _PLUS, _OTHER = Relation.NONE, Relation.PLUS, Relation.OTHER

_SAME = frozenset({
    "convert_element_type", "copy", "copy_p", "mirrored", "optimization_barrier", "stop_gradient",
})  # fmt: skip
"""Operations that keep each number and its place, so that of a sum they give the sum."""

_NEW_DIMS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
"""Operations that keep a number's place if they only add or drop dims of size 1."""


def relation(jaxpr: jex_core.Jaxpr, output: int, old: int, beside: Sequence[int] = ()) -> Relation:
    """Finds what an output of a program has to do with the input that holds its old value.

    Args:
        jaxpr: the program.
        output: which output.
        old: the input with the old value.
        beside: the inputs with the other parts of the same variable, which are not to come in.
    """
    start = [_NONE] * len(jaxpr.invars)
    for i in beside:
        start[i] = _OTHER
    start[old] = _PLUS
    found = _run(jaxpr, start)[output]
    old_aval: Any = jaxpr.invars[old].aval
    new_aval: Any = jaxpr.outvars[output].aval
    reshaped = new_aval.shape != old_aval.shape
    return _OTHER if found is _PLUS and reshaped else found


def _run(jaxpr: Any, inputs: Sequence[Relation]) -> list[Relation]:
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    env: dict[Any, Relation] = dict(zip(inner.invars, inputs, strict=True))

    def read(atom: Any) -> Relation:
        return _NONE if isinstance(atom, jex_core.Literal) else env.get(atom, _NONE)

    for eqn in inner.eqns:
        found = _equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in inner.outvars]


def _equation(eqn: Any, operands: list[Relation]) -> list[Relation]:
    outs = len(eqn.outvars)
    if all(r is _NONE for r in operands):
        return [_NONE] * outs
    name = eqn.primitive.name
    if name == "scan":
        found = _scan(eqn, operands)
    elif name == "cond":
        found = _cond(eqn, operands)
    elif (body := _called(eqn)) is not None:
        found = _run(body, operands)
    else:
        kept = name in _NEW_DIMS and _keeps_places(eqn)
        found = [_PLUS if _is_plus(name, operands, kept) else _OTHER] * outs
    return found if len(found) == outs else [_OTHER] * outs


def _keeps_places(eqn: Any) -> bool:
    """Tells whether the dims above size 1 stay the same, in the same order."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return False  # A transpose and a reshape in one.
    old, new = ([n for n in var.aval.shape if n != 1] for var in (eqn.invars[0], eqn.outvars[0]))
    return old == new


def _is_plus(name: str, operands: list[Relation], kept: bool) -> bool:
    if name in _SAME or kept:
        return operands == [_PLUS]
    if name in ("add", "add_any"):
        return sorted(operands, key=lambda r: r is _PLUS) == [_NONE, _PLUS]
    if name in ("sub", "scatter-add", "scatter_add"):
        return operands[0] is _PLUS and all(r is _NONE for r in operands[1:])
    if name == "select_n":
        return operands[0] is _NONE and all(r is _PLUS for r in operands[1:])
    return False


def _called(eqn: Any) -> Any:
    """Gives the body of an equation that just calls one: jit, remat, custom derivatives."""
    if eqn.primitive.name in ("while", "shard_map", "pallas_call"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(key)
        if isinstance(body, (ClosedJaxpr, jex_core.Jaxpr)):
            inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            return body if len(inner.invars) == len(eqn.invars) else None
    return None


def _scan(eqn: Any, operands: list[Relation]) -> list[Relation]:
    body = eqn.params["jaxpr"]
    # JAX 0.10 gives the numbers, 0.12 trees of a private type: only what is scanned has one dim more
    # outside the body, in both.
    carries = len(eqn.outvars) - num_scanned(eqn.outvars, body.outvars)
    consts = len(operands) - num_scanned(eqn.invars, body.invars) - carries
    if consts < 0:
        return [_OTHER] * len(eqn.outvars)
    first = operands[consts : consts + carries]
    outs = _run(body, operands)
    steady = outs[:carries] == first and all(r is not _PLUS for r in operands[:consts])
    if not steady or any(r is not _NONE for r in operands[consts + carries :]):
        return [_OTHER] * len(outs)
    stacked = [_NONE if r is _NONE else _OTHER for r in outs[carries:]]
    return outs[:carries] + stacked


def _cond(eqn: Any, operands: list[Relation]) -> list[Relation]:
    found = [_run(branch, operands[1:]) for branch in eqn.params["branches"]]
    alike = [rs[0] if len(set(rs)) == 1 else _OTHER for rs in zip(*found, strict=True)]
    return alike if operands[0] is _NONE else [_OTHER] * len(alike)
