"""Is a new value the old one plus something? Only then can what the replicas added be summed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax.program.proof._marks import ClosedJaxpr, num_scanned


class Relation(enum.Enum):
    """What a value has to do with the old value of a variable."""

    NONE = "does not depend on it"
    PLUS = "it plus something that does not depend on it"
    OTHER = "depends on it in another way"


_NONE, _PLUS, _OTHER = Relation.NONE, Relation.PLUS, Relation.OTHER

_SAME = frozenset({
    "copy", "copy_p", "mirrored", "optimization_barrier", "part_of_mean", "stop_gradient",
})  # fmt: skip
"""Operations that keep each number and its place, so that of a sum they give the sum."""

_NEW_DIMS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
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
    old_aval: Any = jaxpr.invars[old].aval
    new_aval: Any = jaxpr.outvars[output].aval
    found = _run(jaxpr, start, _Dtypes(old_aval.dtype, new_aval.dtype))[output]
    reshaped = new_aval.shape != old_aval.shape
    return _OTHER if found is _PLUS and reshaped else found


def _run(jaxpr: Any, inputs: Sequence[Relation], dtypes: _Dtypes) -> list[Relation]:
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    env: dict[Any, Relation] = dict(zip(inner.invars, inputs, strict=True))

    def read(atom: Any) -> Relation:
        return _NONE if isinstance(atom, jex_core.Literal) else env.get(atom, _NONE)

    for eqn in inner.eqns:
        found = _equation(eqn, [read(atom) for atom in eqn.invars], dtypes)
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in inner.outvars]


def _equation(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation]:
    outs = len(eqn.outvars)
    if all(r is _NONE for r in operands):
        return [_NONE] * outs
    name = eqn.primitive.name
    if name == "scan":
        found = _scan(eqn, operands, dtypes)
    elif name == "cond":
        found = _cond(eqn, operands, dtypes)
    elif (body := called_body(eqn)) is not None:
        found = _run(body, operands, dtypes)
    else:
        kept = name in _NEW_DIMS and _keeps_places(eqn)
        if name == "convert_element_type":
            kept = dtypes.keep(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
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


def called_body(eqn: Any) -> Any:
    """Gives the body of an equation that just calls one: jit, remat, custom derivatives."""
    if eqn.primitive.name in ("while", "shard_map", "pallas_call"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(key)
        if isinstance(body, (ClosedJaxpr, jex_core.Jaxpr)):
            inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            return body if len(inner.invars) == len(eqn.invars) else None
    return None


def _scan(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation]:
    body = eqn.params["jaxpr"]
    # JAX 0.10 gives the numbers, 0.12 trees of a private type: only what is scanned has one dim more
    # outside the body, in both.
    carries = len(eqn.outvars) - num_scanned(eqn.outvars, body.outvars)
    consts = len(operands) - num_scanned(eqn.invars, body.invars) - carries
    if consts < 0:
        return [_OTHER] * len(eqn.outvars)
    first = operands[consts : consts + carries]
    outs = _run(body, operands, dtypes)
    steady = outs[:carries] == first and all(r is not _PLUS for r in operands[:consts])
    if not steady or any(r is not _NONE for r in operands[consts + carries :]):
        return [_OTHER] * len(outs)
    stacked = [_NONE if r is _NONE else _OTHER for r in outs[carries:]]
    return outs[:carries] + stacked


def _cond(eqn: Any, operands: list[Relation], dtypes: _Dtypes) -> list[Relation]:
    found = [_run(branch, operands[1:], dtypes) for branch in eqn.params["branches"]]
    alike = [rs[0] if len(set(rs)) == 1 else _OTHER for rs in zip(*found, strict=True)]
    return alike if operands[0] is _NONE else [_OTHER] * len(alike)
