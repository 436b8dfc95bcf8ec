"""Is an output of a step an input that merely passed through, as a random key through ``scan`` and remat?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

from distribute_jax.program.proof._marks import ClosedJaxpr, num_scanned

FOLD = "fold_replica_id"
"""The name of the jitted function that makes each replica's key of a stored one."""

_PASSING = frozenset(
    {"copy", "copy_p", "name", "stop_gradient", "mirrored", "optimization_barrier"}
)
_BODIES = ("jaxpr", "call_jaxpr", "call", "callee")


def is_unchanged(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """Whether an output is an input, or the replica's key of it, on every path; False where unsure."""
    same = [i == old for i in range(len(jaxpr.invars))]
    return _run(jaxpr, same)[output]


def _run(body: Any, inputs: Sequence[bool]) -> list[bool]:
    jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    same = {var for var, is_same in zip(jaxpr.invars, inputs, strict=True) if is_same}
    for eqn in jaxpr.eqns:
        operands = [not isinstance(v, jex_core.Literal) and v in same for v in eqn.invars]
        if any(operands):
            outs = zip(eqn.outvars, _equation(eqn, operands), strict=True)
            same |= {var for var, is_same in outs if is_same}
    return [not isinstance(v, jex_core.Literal) and v in same for v in jaxpr.outvars]


def _equation(eqn: Any, operands: list[bool]) -> list[bool]:
    if eqn.primitive.name in _PASSING and len(eqn.outvars) == len(operands):
        return operands
    if eqn.params.get("name") == FOLD:
        return [True]
    if eqn.primitive.name == "scan":
        return _scan(eqn, operands)
    bodies = [eqn.params[key] for key in _BODIES if hasattr(eqn.params.get(key), "eqns")]
    if len(bodies) == 1 and len(_inputs(bodies[0])) == len(operands):
        return _run(bodies[0], operands)
    return [False] * len(eqn.outvars)


def _inputs(body: Any) -> Sequence[Any]:
    inputs: Sequence[Any] = (body.jaxpr if isinstance(body, ClosedJaxpr) else body).invars
    return inputs


def _scan(eqn: Any, operands: list[bool]) -> list[bool]:
    """A carry that each round hands on; scanned values that each round puts back in their place."""
    body = eqn.params["jaxpr"]
    num_ys = num_scanned(eqn.outvars, body.outvars)
    num_xs = num_scanned(eqn.invars, body.invars)
    num_carry = len(eqn.outvars) - num_ys
    first_carry = len(operands) - num_xs - num_carry
    places = range(len(operands))

    def passes(k: int) -> bool:
        # A constant of the loop that comes out for each round is stacked: another value.
        sources = [first_carry + k] if k < num_carry else places[len(operands) - num_xs :]
        return any(operands[i] and _run(body, [j == i for j in places])[k] for i in sources)

    return [passes(k) for k in range(len(eqn.outvars))]
