"""Jaxprs: their equations at any depth, the bodies that they call, the user's lines; and running a piece."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr

from distribute_jax._mesh import DATA

ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
"""A jaxpr with its constants. JAX 0.12 has one class for both, under both names."""

_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = "site-packages"
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(.*\)")


def open_jaxpr(body: Any) -> Any:
    """Returns a jaxpr without its constants."""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def equations(jaxpr: Any) -> Iterator[Any]:
    """Returns every equation of a program, at any depth."""
    return (inner for eqn in open_jaxpr(jaxpr).eqns for inner in with_inner(eqn))


def with_inner(eqn: Any) -> Iterator[Any]:
    """Returns an equation, and every one in the programs that it holds."""
    yield eqn
    for body in bodies(eqn.params.values()):
        yield from equations(body)


_SIMPLE = frozenset({bool, int, float, str, type(None)})


def bodies(parameters: Iterable[Any]) -> Iterator[Any]:
    """Returns the programs in the parameters of an equation, however deep."""
    for value in parameters:
        if type(value) in _SIMPLE:  # as most are
            continue
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value
        elif isinstance(value, dict):
            yield from bodies(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from bodies(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from bodies(getattr(value, field.name) for field in dataclasses.fields(value))


def collectives(eqn: Any, axis: str) -> Iterator[Any]:
    """Returns the collectives over an axis in and below an equation."""
    named = (inner for inner in with_inner(eqn) if names_axis(inner, axis))
    return (inner for inner in named if inner.primitive.name != "axis_index")


CALLS = (
    *("jit", "call", "closed_call", "eval_jaxpr", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    *("linear_call", "composite", "compute_on", "xla_metadata_call", "cross_device_sum"),
)
"""The primitives that run one body once, on their operands; a checkpoint by JAX's name and by the user's."""


_AXES = ("axes", "axis_name")
"""The parameters in which JAX's collectives name axes."""


class RenamedAxis:
    """Renames the user's axis in every collective to that of the mesh; equal jaxprs inside stay one."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._known: dict[int, tuple[Any, Any]] = {}

    def closed(self, closed: Any) -> Any:
        """Returns a program with the other name."""
        return closed.replace(jaxpr=self._jaxpr(closed.jaxpr))

    def _jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:
            new = jaxpr.replace(
                eqns=[self.equation(eqn) for eqn in jaxpr.eqns], effects=self.effects(jaxpr)
            )
            self._known[id(jaxpr)] = jaxpr, new  # held, so that its id stays its own
        return self._known[id(jaxpr)][1]

    def equation(self, eqn: Any) -> Any:
        """Returns an equation with the other name, also in the programs that it holds."""
        params = {
            key: jax.tree.map(self._axis if key in _AXES else self._inner, value)
            for key, value in eqn.params.items()
        }
        return eqn.replace(params=params, effects=self.effects(eqn))

    def effects(self, of: Any) -> Any:
        """Returns the effects of an equation or program with the other name."""
        return {
            type(e)(self._new) if getattr(e, "name", None) == self._old else e for e in of.effects
        }

    def _axis(self, name: Any) -> Any:
        return self._new if name == self._old else name

    def _inner(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        return self._jaxpr(value) if isinstance(value, Jaxpr) else value


def names_axis(eqn: Any, axis: str) -> bool:
    """Returns whether an equation itself speaks of an axis."""
    named = [eqn.params.get(key) for key in _AXES]
    return any(axis == n or (isinstance(n, tuple | frozenset) and axis in n) for n in named)


def without_axis(body: Any) -> Any:
    """Returns the program of the only replica as one that does not name the axis of the replicas."""
    return _WithoutAxis().closed(body)


class _WithoutAxis(RenamedAxis):
    """Removes an axis of size 1. Only the collectives go through ``vmap``, not what it cannot batch."""

    def __init__(self) -> None:
        super().__init__(DATA, "")
        self._calls: dict[str, Any] = {}

    def equation(self, eqn: Any) -> Any:
        """Returns what a collective over the axis computes as one equation that does not name it."""
        if not names_axis(eqn, DATA):
            return super().equation(eqn)
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        key = f"{eqn.primitive} {eqn.params} {inputs}"
        if key not in self._calls:
            traced = jax.make_jaxpr(jax.jit(functools.partial(_over_one, eqn)))(*inputs)
            (self._calls[key],) = traced.eqns
        where = eqn.source_info
        return self._calls[key].replace(invars=eqn.invars, outvars=eqn.outvars, source_info=where)

    def effects(self, of: Any) -> Any:
        """Leaves out the effect of naming it."""
        return {e for e in of.effects if getattr(e, "name", None) != DATA}


def _over_one(eqn: Any, *values: jax.Array) -> Any:
    if eqn.params.get("perm") == ():  # a shift to the next replica, of which vmap wants one
        return list(map(jnp.zeros_like, values))
    groups = {"axis_index_groups": None} if "axis_index_groups" in eqn.params else {}

    def bound(_: Any, *values: jax.Array) -> Any:
        return eqn.primitive.bind(*values, **{**eqn.params, **groups})

    # All is batched: JAX's all_to_all of what is not has another shape (JAX 0.10.2).
    outs = jax.vmap(bound, axis_name=DATA)(jnp.zeros(1), *(x[None] for x in values))
    # As where there are several replicas, XLA fuses nothing across it: the bits are theirs.
    return jax.lax.optimization_barrier(jax.tree.map(lambda x: x[0], outs))


def called_body(eqn: Any) -> Any:
    """Returns the body that an equation runs on its operands; None for a form that is not known."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")
    params = [eqn.params.get(key) for key in keys]
    bodies = [body for body in params if isinstance(body, Jaxpr | ClosedJaxpr)]
    is_call = len(bodies) == 1 and len(open_jaxpr(bodies[0]).invars) == len(eqn.invars)
    return bodies[0] if is_call else None


def consts_and_carries(scan: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants of its loop, and how many are carries.

    JAX 0.10 gives the numbers, 0.12 trees of a private type. The shapes tell in both: only what is
    scanned, or stacked, has one dim more outside the body.
    """
    inner = open_jaxpr(scan.params["jaxpr"])
    scanned, stacked = (
        sum(len(x.aval.shape) != len(y.aval.shape) for x, y in zip(outer, of_body, strict=True))
        for outer, of_body in ((scan.invars, inner.invars), (scan.outvars, inner.outvars))
    )
    carries = len(scan.outvars) - stacked
    return len(scan.invars) - scanned - carries, carries


def has_effects(program: Any) -> bool:
    """Returns whether a program, or an equation, does more than compute its results."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in program.effects)


def is_ref(var: Any) -> bool:
    """Returns whether a variable of a jaxpr is a reference to memory that can be written."""
    return type(var.aval).__name__ == "AbstractRef" or bool(getattr(var.aval, "has_qdd", False))


def name(eqn: Any) -> str:
    """Returns the name of the equation's primitive, as users know it."""
    primitive: str = eqn.primitive.name
    return "checkpoint" if primitive == "remat2" else primitive


def line(eqn: Any, *, full_path: bool = False) -> str:
    """Returns the user's line that made the equation, as ``file:line``; else that of another library."""
    known = user_line(eqn, full_path=full_path) or str(eqn.source_info.name_stack)
    others = (frame for frame in _frames(eqn) if not frame.startswith((_PACKAGE, "<frozen")))
    return known or next(others, "an unknown line").rpartition(_INSTALLED)[2].lstrip("/\\")


def user_line(eqn: Any, *, full_path: bool = False) -> str | None:
    """Returns that line, or None for an equation of a function that a library itself has traced."""
    for frame in _frames(eqn):
        if not frame.startswith((_PACKAGE, "<frozen")) and _INSTALLED not in frame:
            return frame if full_path else Path(frame).name
    return None


def _frames(eqn: Any) -> Iterator[str]:
    """Yields the lines on whose behalf JAX made an equation, the outermost first."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()
    matches = filter(None, map(_FRAME.fullmatch, reversed(frames)))
    return (f"{match['file']}:{match['line']}" for match in matches)


Values = dict[Any, Any]
"""What the variables of a jaxpr stand for."""


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among operands or results, each once."""
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, jex_core.Literal)))


def inputs_of(eqns: Iterable[Any]) -> list[Any]:
    """Returns what some equations read."""
    return [v for eqn in eqns for v in eqn.invars]


def outputs_of(eqns: Iterable[Any]) -> set[Any]:
    """Returns the variables that some equations compute."""
    return {v for eqn in eqns for v in eqn.outvars}


def value_of(atom: Any, values: Values) -> Any:
    """Returns what an operand stands for."""
    if isinstance(atom, jex_core.Literal):
        literal: Any = atom
        return jnp.asarray(literal.val, literal.aval.dtype)
    return values[atom]


def run_equations(
    jaxpr: jex_core.Jaxpr, eqns: Sequence[Any], values: Values, wanted: Iterable[Any]
) -> None:
    """Runs some equations, and adds what is wanted of their results to the values."""
    computed = outputs_of(eqns)
    outs = [v for v in variables(wanted) if v in computed]
    if not outs and not any(eqn.effects for eqn in eqns):
        return
    reads = [v for v in variables(inputs_of(eqns)) if v not in computed]
    piece = jaxpr.replace(constvars=[], invars=reads, outvars=outs, eqns=list(eqns))
    results = jex_core.jaxpr_as_fun(ClosedJaxpr(piece, ()))(*(values[v] for v in reads))
    values.update(zip(outs, results, strict=True))


def initial_values(body: Any, args: Sequence[Any]) -> Values:
    """Returns the values that a jaxpr starts from: its constants and its inputs."""
    inner, consts = open_jaxpr(body), getattr(body, "consts", ())
    return dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))


def run_with_body(eqn: Any, body: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """Runs an equation of one body, such as ``jax.checkpoint``, with a function in place of that body."""
    closed = jax.make_jaxpr(body)(*operands)
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return list(eqn.primitive.bind(*closed.consts, *operands, **{**eqn.params, "jaxpr": jaxpr}))


Override = Callable[..., Sequence[Any]] | None
"""What returns the results of an equation from its operands; None to run it as it is."""


def with_overrides(body: Any, way: Callable[[Any], Override]) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function, in which some equations are run in another way."""

    def run(*args: Any) -> list[Any]:
        jaxpr, values = open_jaxpr(body), initial_values(body, args)
        wanted = variables([*inputs_of(jaxpr.eqns), *jaxpr.outvars])
        for other, eqns in itertools.groupby(jaxpr.eqns, way):
            if other is None:
                run_equations(jaxpr, list(eqns), values, wanted)
                continue
            for eqn in eqns:
                outs = other(*(value_of(v, values) for v in eqn.invars))
                values.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(v, values) for v in jaxpr.outvars]

    return run


def run_bodies(
    eqn: Any, run: Callable[[Any, Sequence[Any]], list[Any]], operands: Sequence[Any]
) -> list[Any] | None:
    """Runs a loop, condition or call, whose programs ``run`` takes with their inputs; None for another."""
    kind, params, values = eqn.primitive.name, eqn.params, list(operands)
    if kind == "scan":
        consts, carries = consts_and_carries(eqn)
        first = consts + carries

        def one(carry: Any, xs: Any) -> Any:
            outs = run(params["jaxpr"], [*values[:consts], *carry, *xs])
            return outs[:carries], outs[carries:]

        loop = {key: params[key] for key in ("reverse", "length", "unroll")}
        carry, ys = jax.lax.scan(one, values[consts:first], values[first:], **loop)
        return [*carry, *ys]
    if kind == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outs: list[Any] = jax.lax.while_loop(
            lambda carry: run(params["cond_jaxpr"], [*values[:first], *carry])[0],
            lambda carry: run(params["body_jaxpr"], [*values[first:second], *carry]),
            values[second:],
        )
        return outs
    if kind == "cond":
        branches = [lambda *x, body=body: run(body, x) for body in params["branches"]]
        return list(jax.lax.switch(values[0], branches, *values[1:]))
    body = called_body(eqn) if kind in CALLS else None
    return None if body is None else run(body, values)


def is_jit_of_collectives(eqn: Any) -> bool:
    """Returns whether an equation calls a jitted function in which replicas meet."""
    return name(eqn) == "jit" and any(names_axis(e, DATA) for e in with_inner(eqn))


def narrowed_cond(eqn: Any, outs: Sequence[int]) -> Any:
    """Returns a condition that computes some of its results, and reads only what these need.

    It also returns what its branches compute of ``shared`` numbers, as new variables.
    """
    bodies = eqn.params["branches"]
    parts = [needed_only(open_jaxpr(body), outs) for body in bodies]
    reads = sorted(set().union(*(reads for _, reads in parts)))
    numbers = [
        (branch, v)
        for branch, (body, (part, _)) in enumerate(zip(bodies, parts, strict=True))
        for v in shared_scalars(part.eqns, open_jaxpr(body))
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


def shared_scalars(eqns: Sequence[Any], jaxpr: Any) -> list[Any]:
    """Returns the numbers that some equations of a program compute or read, and others read too.

    A number with one reader XLA computes in its loop, where a power may differ in the last bit, and it
    divides by the number in another way. So a part of a program returns them, although nobody reads them.
    """
    here, all_ = (Counter(v for e in of for v in variables(e.invars)) for of in (eqns, jaxpr.eqns))
    computed = outputs_of(jaxpr.eqns)
    of_conds = [v for eqn in eqns for v in eqn.outvars if v not in computed]
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
    part, needed = needed_only(open_jaxpr(body), outs)
    reads, numbers = sorted(needed), shared_scalars(part.eqns, open_jaxpr(body))
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


_NARROWED = {"cond": narrowed_cond, "jit": _narrowed_jit}
