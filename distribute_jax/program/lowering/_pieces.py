"""Running a jaxpr in pieces: some of its equations now, others elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp

from distribute_jax._mesh import DATA
from distribute_jax.program.proof._marks import ClosedJaxpr
from distribute_jax.program.proof._prove import collectives

Values = dict[Any, Any]
"""What the variables of a jaxpr stand for."""


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Gives the variables among operands or results, each once."""
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, jex_core.Literal)))


def value_of(atom: Any, values: Values) -> Any:
    """Gives what an operand stands for."""
    if isinstance(atom, jex_core.Literal):
        literal: Any = atom
        return jnp.asarray(literal.val, literal.aval.dtype)
    return values[atom]


def run_piece(
    jaxpr: jex_core.Jaxpr, eqns: Sequence[Any], values: Values, wanted: Iterable[Any]
) -> None:
    """Runs some equations, and adds what is wanted of their results to the values."""
    made = {v for eqn in eqns for v in eqn.outvars}
    outs = [v for v in variables(wanted) if v in made]
    if not outs and not any(eqn.effects for eqn in eqns):
        return
    reads = [v for v in variables(v for eqn in eqns for v in eqn.invars) if v not in made]
    piece = jaxpr.replace(constvars=[], invars=reads, outvars=outs, eqns=list(eqns))
    results = jex_core.jaxpr_as_fun(ClosedJaxpr(piece, ()))(*(values[v] for v in reads))
    values.update(zip(outs, results, strict=True))


def start(body: Any, args: Sequence[Any]) -> Values:
    """Gives the values that a jaxpr starts from: its constants and its inputs."""
    inner = body.jaxpr
    return dict(zip([*inner.constvars, *inner.invars], [*body.consts, *args], strict=True))


def flat(body: Any) -> Callable[..., list[Any]]:
    """Gives a jaxpr as a function without the ``jit``s in it that talk to the other replicas."""

    def run(*args: Any) -> list[Any]:
        jaxpr, values = body.jaxpr, start(body, args)
        later = variables(jaxpr.outvars)
        wanted = variables([*(v for eqn in jaxpr.eqns for v in eqn.invars), *later])
        piece: list[Any] = []
        for eqn in jaxpr.eqns:
            if not _is_talking_jit(eqn):
                piece.append(eqn)
                continue
            run_piece(jaxpr, piece, values, wanted)
            piece = []
            outs = flat(eqn.params["jaxpr"])(*(value_of(v, values) for v in eqn.invars))
            values.update(zip(eqn.outvars, outs, strict=True))
        run_piece(jaxpr, piece, values, wanted)
        return [value_of(v, values) for v in jaxpr.outvars]

    return run


def has_talking_jit(body: Any) -> bool:
    """Tells whether ``flat`` changes anything."""
    return any(map(_is_talking_jit, body.jaxpr.eqns))


def _is_talking_jit(eqn: Any) -> bool:
    return eqn.primitive.name in {"jit", "pjit"} and any(collectives(eqn, DATA))
