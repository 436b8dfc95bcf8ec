"""How a value of a traced step depends on its inputs: unchanged, incremented, or always zero."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax.program._replication_rules import ClosedJaxpr, consts_and_carries


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
    """Returns whether the dims above size 1 stay the same, in the same order."""
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
    """Returns the body of an equation that just calls one: jit, remat, custom derivatives."""
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
    consts, carries = consts_and_carries(eqn)
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
    common = [rs[0] if len(set(rs)) == 1 else _OTHER for rs in zip(*found, strict=True)]
    return common if operands[0] is _NONE else [_OTHER] * len(common)


FOLD = "fold_replica_id"
"""The name of the jitted function that makes each replica's key of a stored one."""

_PASSING = frozenset(
    {"copy", "copy_p", "name", "stop_gradient", "mirrored", "optimization_barrier"}
)
_BODIES = ("jaxpr", "call_jaxpr", "call", "callee")


def is_unchanged(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """Whether an output is an input, or the replica's key of it, on every path; False where unsure."""
    same = [i == old for i in range(len(jaxpr.invars))]
    return _unchanged_outputs(jaxpr, same)[output]


def _unchanged_outputs(body: Any, inputs: Sequence[bool]) -> list[bool]:
    jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    same = {var for var, is_same in zip(jaxpr.invars, inputs, strict=True) if is_same}
    for eqn in jaxpr.eqns:
        operands = [not isinstance(v, jex_core.Literal) and v in same for v in eqn.invars]
        if any(operands):
            outs = zip(eqn.outvars, _unchanged_by(eqn, operands), strict=True)
            same |= {var for var, is_same in outs if is_same}
    return [not isinstance(v, jex_core.Literal) and v in same for v in jaxpr.outvars]


def _unchanged_by(eqn: Any, operands: list[bool]) -> list[bool]:
    if eqn.primitive.name in _PASSING and len(eqn.outvars) == len(operands):
        return operands
    if eqn.params.get("name") == FOLD:
        return [True]
    if eqn.primitive.name == "scan":
        return _unchanged_by_scan(eqn, operands)
    bodies = [eqn.params[key] for key in _BODIES if hasattr(eqn.params.get(key), "eqns")]
    if len(bodies) == 1 and len(_inputs(bodies[0])) == len(operands):
        return _unchanged_outputs(bodies[0], operands)
    return [False] * len(eqn.outvars)


def _inputs(body: Any) -> Sequence[Any]:
    inputs: Sequence[Any] = (body.jaxpr if isinstance(body, ClosedJaxpr) else body).invars
    return inputs


def _unchanged_by_scan(eqn: Any, operands: list[bool]) -> list[bool]:
    """A carry that each round hands on; scanned values that each round puts back in their place."""
    body = eqn.params["jaxpr"]
    first_carry, num_carry = consts_and_carries(eqn)
    places = range(len(operands))

    def passes(k: int) -> bool:
        # A constant of the loop that comes out for each round is stacked: another value.
        sources = [first_carry + k] if k < num_carry else places[first_carry + num_carry :]
        return any(
            operands[i] and _unchanged_outputs(body, [j == i for j in places])[k] for i in sources
        )

    return [passes(k) for k in range(len(eqn.outvars))]


_KEEPS_ZEROS = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p",
    "mirrored", "neg", "optimization_barrier", "part_of_mean", "reduce_sum", "reshape", "squeeze",
    "stop_gradient", "sub", "transpose", "unreduced",
})  # fmt: skip
"""Operations that make zeros of zeros."""


def are_zeros(jaxpr: Any, target: Any) -> bool:
    """Whether all operands of an equation, in or below ``jaxpr``, are zeros wherever it runs."""
    met: list[bool] = []
    _zero_outputs(jaxpr, [False] * len(jaxpr.jaxpr.invars), target, met)
    return bool(met) and all(met)


def _zero_outputs(body: Any, inputs: Sequence[bool], target: Any, met: list[bool]) -> list[bool]:
    inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    zeros = {var for var, is_zero in zip(inner.invars, inputs, strict=True) if is_zero}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, jex_core.Literal):
            return not np.any(atom.val)
        return atom in zeros

    for eqn in inner.eqns:
        operands = [is_zero(atom) for atom in eqn.invars]
        if eqn is target:
            met.append(all(operands))
        outs = _zeros_after(eqn, operands, target, met)
        zeros.update(v for v, zero in zip(eqn.outvars, outs, strict=True) if zero)
    return [is_zero(atom) for atom in inner.outvars]


def _zeros_after(eqn: Any, operands: list[bool], target: Any, met: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    none = [False] * len(eqn.outvars)
    if (call := called_body(eqn)) is not None:
        outs = _zero_outputs(call, operands, target, met)
        return outs if len(outs) == len(none) else none
    for body in jex_core.jaxprs_in_params(eqn.params):
        _zero_outputs(body, [False] * len(body.invars), target, met)
    if name == "mul":
        return [any(operands)]
    if name == "div":
        return [operands[0]]
    return [name in _KEEPS_ZEROS and bool(operands) and all(operands)] * len(none)
