"""Runs some of the equations of a jaxpr, in place of all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import DATA
from distribute_jax.program._jaxprs import ClosedJaxpr, equations, names_axis, opened

Values = dict[Any, Any]
"""What the variables of a jaxpr stand for."""


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among operands or results, each once."""
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, jex_core.Literal)))


def value_of(atom: Any, values: Values) -> Any:
    """Returns what an operand stands for."""
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
    """Returns the values that a jaxpr starts from: its constants and its inputs."""
    inner, consts = opened(body), getattr(body, "consts", ())
    return dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))


def run_with_body(eqn: Any, body: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """Runs an equation of one body, such as ``jax.checkpoint``, with a function in place of that body."""
    closed = jax.make_jaxpr(body)(*operands)
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return list(eqn.primitive.bind(*closed.consts, *operands, **{**eqn.params, "jaxpr": jaxpr}))


def flat(body: Any, is_opened: Callable[[Any], bool]) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function, with what some of its ``jit``s run in the place of these."""

    def run(*args: Any) -> list[Any]:
        jaxpr, values = body.jaxpr, start(body, args)
        wanted = variables([*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars])
        for is_open, eqns in itertools.groupby(jaxpr.eqns, is_opened):
            if not is_open:
                run_piece(jaxpr, list(eqns), values, wanted)
                continue
            for eqn in eqns:
                outs = flat(eqn.params["jaxpr"], is_opened)(
                    *(value_of(v, values) for v in eqn.invars)
                )
                values.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(v, values) for v in jaxpr.outvars]

    return run


def is_jit(eqn: Any) -> bool:
    """Returns whether an equation calls a jitted function."""
    return eqn.primitive.name in {"jit", "pjit"}


def is_jit_of_collectives(eqn: Any) -> bool:
    """Returns whether an equation calls a jitted function in which replicas meet."""
    return is_jit(eqn) and any(names_axis(e, DATA) for e in equations(opened(eqn.params["jaxpr"])))


def narrowed_cond(eqn: Any, outs: Sequence[int]) -> Any:
    """Returns a condition that computes some of its results, and reads only what these need.

    It also returns what its branches compute of ``shared`` numbers, as new variables.
    """
    bodies = eqn.params["branches"]
    parts = [needed_only(opened(body), outs) for body in bodies]
    reads = sorted(set().union(*(reads for _, reads in parts)))
    numbers = [
        (branch, v)
        for branch, (body, (part, _)) in enumerate(zip(bodies, parts, strict=True))
        for v in shared(part.eqns, opened(body))
    ]
    branches = tuple(
        ClosedJaxpr(
            jaxpr.replace(
                invars=[jaxpr.invars[i] for i in reads],
                outvars=[*jaxpr.outvars, *(v if of == i else _zero(v) for of, v in numbers)],
            ),
            getattr(body, "consts", ()),
        )
        for i, (body, (jaxpr, _)) in enumerate(zip(bodies, parts, strict=True))
    )
    return eqn.replace(
        invars=[eqn.invars[0], *(eqn.invars[1 + i] for i in reads)],
        outvars=[*(eqn.outvars[i] for i in outs), *(jex_core.Var(v.aval) for _, v in numbers)],
        params={**eqn.params, "branches": branches},
    )


def shared(eqns: Sequence[Any], jaxpr: Any) -> list[Any]:
    """Returns the numbers that some equations of a program compute or read, and others read too.

    A number with one reader XLA computes in its loop, where a power may differ in the last bit, and it
    divides by the number in another way. So a part of a program returns them, although nobody reads them.
    """
    here, all_ = (Counter(v for e in of for v in variables(e.invars)) for of in (eqns, jaxpr.eqns))
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    of_conds = [v for eqn in eqns for v in eqn.outvars if v not in made]
    return [*(v for v, n in here.items() if v.aval.shape == () and n < all_[v]), *of_conds]


def _zero(v: Any) -> Any:
    return jex_core.Literal(np.zeros((), v.aval.dtype), v.aval)


def needed_only(jaxpr: Any, outs: Sequence[int]) -> tuple[Any, set[int]]:
    """Returns a program with some of its outputs, and the inputs that these need."""
    atoms = [jaxpr.outvars[i] for i in outs]
    needed, eqns = set(variables(atoms)), []
    for eqn in reversed(jaxpr.eqns):
        if kept := tuple(i for i, v in enumerate(eqn.outvars) if v in needed):
            narrowed = _NARROWED.get(eqn.primitive.name) if len(kept) < len(eqn.outvars) else None
            eqns.append(narrowed(eqn, kept) if narrowed else eqn)
            needed.update(variables(eqns[-1].invars))
    reads = {i for i, v in enumerate(jaxpr.invars) if v in needed}
    return jaxpr.replace(outvars=atoms, eqns=eqns[::-1]), reads


def _narrowed_jit(eqn: Any, outs: Sequence[int]) -> Any:
    """As ``narrowed_cond``, of a call of a jitted function."""
    body, params = eqn.params["jaxpr"], dict(eqn.params)
    part, needed = needed_only(opened(body), outs)
    reads, numbers = sorted(needed), shared(part.eqns, opened(body))
    for key in {"donated_invars", "in_shardings", "in_layouts"} & params.keys():
        params[key] = tuple(params[key][i] for i in reads)
    for key in {"out_shardings", "out_layouts"} & params.keys():
        params[key] = tuple(params[key][i] for i in (*outs, *[0] * len(numbers)))
    part = part.replace(invars=[part.invars[i] for i in reads], outvars=[*part.outvars, *numbers])
    params["jaxpr"] = ClosedJaxpr(part, body.consts)
    return eqn.replace(
        invars=[eqn.invars[i] for i in reads],
        outvars=[*(eqn.outvars[i] for i in outs), *(jex_core.Var(v.aval) for v in numbers)],
        params=params,
    )


_NARROWED = {"cond": narrowed_cond, "jit": _narrowed_jit, "pjit": _narrowed_jit}
