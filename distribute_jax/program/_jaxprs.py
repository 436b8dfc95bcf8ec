"""Reads jaxprs (equations, nested bodies, user lines), and evaluates, prunes and rewrites them."""

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
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core, source_info_util
from jax.extend.core import Jaxpr

from distribute_jax._mesh import DATA

ClosedJaxpr: Any = getattr(jex_core, "ClosedJaxpr", jex_core.Jaxpr)
"""A jaxpr with its constants. JAX 0.12 has one class for both, under both names."""

_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = "site-packages"
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(.*\)")


def open_jaxpr(body: Any) -> Any:
    """Returns the jaxpr of a closed one; an open jaxpr is returned as it is."""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def equations(jaxpr: Any) -> Iterator[Any]:
    """Returns every equation of a jaxpr, at any depth."""
    return (inner for eqn in open_jaxpr(jaxpr).eqns for inner in with_inner(eqn))


def with_inner(eqn: Any) -> Iterator[Any]:
    """Yields an equation, and every equation of the jaxprs in its parameters."""
    yield eqn
    for body in bodies(eqn.params.values()):
        yield from equations(body)


_SIMPLE = frozenset({bool, int, float, str, type(None)})


def bodies(parameters: Iterable[Any]) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation, also in containers and dataclasses."""
    for value in parameters:
        if type(value) in _SIMPLE:  # most parameters, and the tests below are slow
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
    """Yields the collectives over an axis, of the equation itself and of its bodies."""
    inner = (e for e in with_inner(eqn) if e.primitive.name != "axis_index")
    return (e for e in inner if names_axis(e, axis))


CALLS = (
    *("jit", "call", "closed_call", "eval_jaxpr", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    *("linear_call", "composite", "compute_on", "xla_metadata_call", "cross_device_sum"),
)
"""The primitives that run one body once, on their operands; checkpoint under both of its names."""

INLINED = frozenset({"jit", "custom_jvp_call", "custom_vjp_call"})
"""The calls that are no more than their bodies once gradients are computed."""

RANDOM = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")
"""The primitives that draw random numbers."""

_AXES = ("axes", "axis_name")
"""The parameters in which collectives name axes."""


class RenamedAxis:
    """Renames an axis in every collective; a body that is shared stays shared."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._known: dict[int, tuple[Any, Any]] = {}

    def body(self, body: Any) -> Any:
        """Returns a jaxpr, open or closed, with the new name."""
        if id(body) not in self._known:
            if (inside := open_jaxpr(body)) is not body:
                new = body.replace(jaxpr=self.body(inside))
            else:
                eqns = [kept for eqn in body.eqns if (kept := self.equation(eqn)) is not None]
                new = body.replace(eqns=eqns, effects=self.effects(body))
            self._known[id(body)] = body, new  # the reference keeps the id from being reused
        return self._known[id(body)][1]

    def equation(self, eqn: Any) -> Any:
        """Returns an equation with the new name, in its bodies too; None removes it."""
        if not (eqn.effects or names_axis(eqn, self._old) or any(bodies(eqn.params.values()))):
            return eqn
        params = {
            key: jax.tree.map(self._axis if key in _AXES else self._inner, value)
            for key, value in eqn.params.items()
        }
        return eqn.replace(params=params, effects=self.effects(eqn))

    def effects(self, of: Any) -> Any:
        """Returns the effects of an equation or jaxpr with the new name."""
        old, new = self._old, self._new
        return {type(e)(new) if getattr(e, "name", None) == old else e for e in of.effects}

    def _axis(self, name: Any) -> Any:
        return self._new if name == self._old else name

    def _inner(self, value: Any) -> Any:
        return self.body(value) if isinstance(value, (Jaxpr, ClosedJaxpr)) else value


def names_axis(eqn: Any, axis: str) -> bool:
    """True if the parameters of the equation itself name the axis."""
    for key in _AXES:
        named = eqn.params.get(key, ())
        if named == axis or (isinstance(named, (tuple, frozenset)) and axis in named):
            return True
    return False


def without_axis(body: Any) -> Any:
    """Returns the program of a single replica without the axis of the replicas."""
    return _WithoutAxis().body(body)


class _WithoutAxis(RenamedAxis):
    """Removes an axis of size 1.

    Only the collectives are traced under ``vmap``, since the step may hold what it cannot batch.
    """

    def __init__(self) -> None:
        super().__init__(DATA, "")
        self._calls: dict[str, Any] = {}

    def equation(self, eqn: Any) -> Any:
        """Replaces a collective by a jit of what it computes on one replica."""
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
        """Drops the effect of naming the axis."""
        return {e for e in of.effects if getattr(e, "name", None) != DATA}


def _over_one(eqn: Any, *values: jax.Array) -> Any:
    if eqn.params.get("axes") == (DATA,):  # a sum, maximum or minimum of one value
        return jax.lax.optimization_barrier(values)
    if eqn.params.get("perm") == ():  # a ppermute to nobody, which vmap refuses
        return list(map(jnp.zeros_like, values))
    groups = {"axis_index_groups": None} if "axis_index_groups" in eqn.params else {}

    def bound(_: Any, *values: jax.Array) -> Any:
        return eqn.primitive.bind(*values, **{**eqn.params, **groups})

    # Every operand is batched: all_to_all of an unbatched one has another shape (JAX 0.10.2).
    outs = jax.vmap(bound, axis_name=DATA)(jnp.zeros(1), *(x[None] for x in values))
    # XLA fuses nothing across a collective of several replicas; the barrier keeps the bits equal.
    return jax.lax.optimization_barrier(jax.tree.map(lambda x: x[0], outs))


def called_body(eqn: Any) -> Any:
    """Returns the body that an equation runs on its operands; None if the form is unknown."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")
    params = [eqn.params.get(key) for key in keys]
    bodies = [body for body in params if isinstance(body, Jaxpr | ClosedJaxpr)]
    is_call = len(bodies) == 1 and len(open_jaxpr(bodies[0]).invars) == len(eqn.invars)
    return bodies[0] if is_call else None


def consts_and_carries(scan: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carries.

    JAX 0.10 has these numbers as parameters, 0.12 has trees of a private type. Shapes work for both:
    only what is scanned or stacked has one more dim outside the body.
    """
    inner = open_jaxpr(scan.params["jaxpr"])
    scanned, stacked = (
        sum(len(x.aval.shape) != len(y.aval.shape) for x, y in zip(outer, of_body, strict=True))
        for outer, of_body in ((scan.invars, inner.invars), (scan.outvars, inner.outvars))
    )
    carries = len(scan.outvars) - stacked
    return len(scan.invars) - scanned - carries, carries


def has_effects(program: Any) -> bool:
    """True if a jaxpr or an equation does more than compute its results."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in program.effects)


def is_ref(var: Any) -> bool:
    """True if a variable of a jaxpr is a mutable reference."""
    return type(var.aval).__name__ == "AbstractRef" or bool(getattr(var.aval, "has_qdd", False))


def name(eqn: Any) -> str:
    """Returns the primitive's name as users know it."""
    primitive: str = eqn.primitive.name
    return "checkpoint" if primitive == "remat2" else primitive


def line(eqn: Any, *, full_path: bool = False) -> str:
    """Returns the user's line that made the equation, as ``file:line``; else one of another library."""
    known = user_line(eqn, full_path=full_path) or str(eqn.source_info.name_stack)
    others = (frame for frame in frames(eqn) if not frame.startswith((_PACKAGE, "<frozen")))
    return known or next(others, "an unknown line").rpartition(_INSTALLED)[2].lstrip("/\\")


def user_line(eqn: Any, *, full_path: bool = False) -> str | None:
    """Returns the user's line, or None if a library traced the function by itself."""
    for frame in frames(eqn):
        if not frame.startswith((_PACKAGE, "<frozen")) and _INSTALLED not in frame:
            return frame if full_path else Path(frame).name
    return None


def frames(eqn: Any) -> Iterator[str]:
    """Returns the traceback of an equation as ``file:line``, outermost first."""
    lines = source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()
    matches = filter(None, map(_FRAME.fullmatch, reversed(lines)))
    return (f"{match['file']}:{match['line']}" for match in matches)


def is_of_pmean(eqn: Any) -> bool:
    """True for an equation of ``jax.lax.pmean``."""
    traceback = eqn.source_info.traceback
    calls = traceback.frames if traceback else ()
    return any(c.function_name == "pmean" and "/jax/_src/" in c.file_name for c in calls)


Values = dict[Any, Any]
"""The values of the variables of a jaxpr."""


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among atoms, each once."""
    return list(dict.fromkeys(v for v in atoms if not is_literal(v)))


def equations_before(
    eqns: Sequence[Any],
    atoms: Iterable[Any],
    part_of: Callable[[Any, set[Any]], Any] = lambda eqn, needed: eqn,
) -> list[Any]:
    """Returns the equations that some values depend on.

    ``part_of`` returns an equation that computes only what is needed, or None to leave it out.
    """
    needed, before = set(variables(atoms)), list[Any]()
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars) and (part := part_of(eqn, needed)) is not None:
            before.append(part)
            needed.update(variables(part.invars))
    return before[::-1]


def inputs_of(eqns: Iterable[Any]) -> list[Any]:
    """Returns the operands of equations, in order."""
    return [v for eqn in eqns for v in eqn.invars]


def outputs_of(eqns: Iterable[Any]) -> set[Any]:
    """Returns the variables that equations compute."""
    return {v for eqn in eqns for v in eqn.outvars}


def value_of(atom: Any, values: Values) -> Any:
    return jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else values[atom]


def run_equations(
    jaxpr: jex_core.Jaxpr, eqns: Sequence[Any], values: Values, wanted: Iterable[Any]
) -> None:
    """Runs some equations of a jaxpr, and adds their ``wanted`` results to ``values``."""
    computed = outputs_of(eqns)
    outs = [v for v in variables(wanted) if v in computed]
    if not outs and not any(eqn.effects for eqn in eqns):
        return
    reads = [v for v in variables(inputs_of(eqns)) if v not in computed]
    piece = jaxpr.replace(constvars=[], invars=reads, outvars=outs, eqns=list(eqns))
    results = jex_core.jaxpr_as_fun(ClosedJaxpr(piece, ()))(*(values[v] for v in reads))
    values.update(zip(outs, results, strict=True))


def initial_values(body: Any, args: Sequence[Any]) -> Values:
    """Returns the values of a jaxpr's constants and inputs."""
    inner, consts = open_jaxpr(body), getattr(body, "consts", ())
    return dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))


def run_with_body(eqn: Any, body: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """Runs an equation of one body, such as ``jax.checkpoint``, with another function as its body."""
    closed = jax.make_jaxpr(body)(*operands)
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return list(eqn.primitive.bind(*closed.consts, *operands, **{**eqn.params, "jaxpr": jaxpr}))


Override = Callable[..., Sequence[Any]] | None
"""Computes the results of an equation from its operands; None to run the equation itself."""


def run_with(
    jaxpr: Any,
    eqns: Iterable[Any],
    values: Values,
    wanted: Iterable[Any],
    override_of: Callable[[Any], Override],
) -> None:
    """Runs equations, some of them in another way, and adds the ``wanted`` results to ``values``."""
    wanted = variables(wanted)
    for override, group in itertools.groupby(eqns, override_of):
        if override is None:
            run_equations(jaxpr, list(group), values, wanted)
            continue
        for eqn in group:
            outs = override(*(value_of(v, values) for v in eqn.invars))
            values.update(zip(eqn.outvars, outs, strict=True))


def with_overrides(body: Any, override_of: Callable[[Any], Override]) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function in which some equations are replaced."""

    def run(*args: Any) -> list[Any]:
        jaxpr, values = open_jaxpr(body), initial_values(body, args)
        run_with(jaxpr, jaxpr.eqns, values, [*inputs_of(jaxpr.eqns), *jaxpr.outvars], override_of)
        return [value_of(v, values) for v in jaxpr.outvars]

    return run


def run_bodies(
    eqn: Any, run: Callable[[Any, Sequence[Any]], list[Any]], operands: Sequence[Any]
) -> list[Any] | None:
    """Runs a scan, while, cond or call with ``run(body, inputs)`` for each body; None for others."""
    kind, params, values = eqn.primitive.name, eqn.params, list(operands)
    if kind == "scan":
        consts, carries = consts_and_carries(eqn)
        first = consts + carries

        def iteration(carry: Any, xs: Any) -> Any:
            outs = run(params["jaxpr"], [*values[:consts], *carry, *xs])
            return outs[:carries], outs[carries:]

        loop = {key: params[key] for key in ("reverse", "length", "unroll")}
        carry, ys = jax.lax.scan(iteration, values[consts:first], values[first:], **loop)
        return [*carry, *ys]
    if kind == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        [goes_on] = open_jaxpr(params["cond_jaxpr"]).outvars
        is_batched = goes_on.aval.shape != ()
        choose: Any = jnp.where
        for _ in goes_on.aval.shape:  # under vmap each element of a loop ends by itself
            choose = jax.vmap(choose)

        def test(carry: Any) -> Any:
            return run(params["cond_jaxpr"], [*values[:first], *carry])[0]

        def step(carry: Any) -> Any:
            outs = run(params["body_jaxpr"], [*values[first:second], *carry])
            if is_batched:
                return list(map(functools.partial(choose, test(carry)), outs, carry))
            return outs

        return list(jax.lax.while_loop(lambda carry: test(carry).any(), step, values[second:]))
    if kind == "cond":
        branches = [lambda *x, body=body: run(body, x) for body in params["branches"]]
        return list(jax.lax.switch(values[0], branches, *values[1:]))
    body = called_body(eqn) if kind in CALLS else None
    return None if body is None else run(body, values)


def inlined(closed: Any, opens: Callable[[Any], bool]) -> Any:
    """Returns a jaxpr with their bodies in place of the calls that ``opens`` selects, also in branches.

    A body keeps the line of its call: JAX caches bodies, with the lines of other calls.
    """
    jaxpr = closed.jaxpr
    eqns, constvars, consts = list[Any](), [*jaxpr.constvars], [*closed.consts]

    def add(body: Any, env: dict[Any, Any], call: Any) -> list[Any]:
        def read(v: Any) -> Any:
            return v if isinstance(v, jex_core.Literal) else env.get(v, v)

        for eqn in open_jaxpr(body).eqns:
            where, reads = (call or eqn).source_info, list(map(read, eqn.invars))
            if opens(eqn):
                inner = called_body(eqn)
                inside = dict(zip(open_jaxpr(inner).invars, reads, strict=True))
                for v, const in zip(open_jaxpr(inner).constvars, inner.consts, strict=True):
                    inside[v] = jex_core.Var(v.aval)
                    constvars.append(inside[v])
                    consts.append(const)
                env.update(zip(eqn.outvars, add(inner, inside, call or eqn), strict=True))
                continue
            outs = eqn.outvars if call is None else [jex_core.Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            params = eqn.params
            if eqn.primitive.name == "cond":
                branches = tuple(inlined(branch, opens) for branch in params["branches"])
                params = {**params, "branches": branches}
            eqns.append(eqn.replace(invars=reads, outvars=outs, params=params, source_info=where))
        return list(map(read, open_jaxpr(body).outvars))

    outs = add(jaxpr, {}, None)
    return ClosedJaxpr(jaxpr.replace(constvars=constvars, eqns=eqns, outvars=outs), consts)


def narrowed(eqn: Any, outs: Sequence[int]) -> Any:
    """Returns a cond or a jit that computes only some of its outputs, and reads only what they need.

    The ``shared_scalars`` of its bodies are added as outputs.
    """
    params = dict(eqn.params)
    bodies = params.get("branches") or (params["jaxpr"],)
    before = len(eqn.invars) - len(
        open_jaxpr(bodies[0]).invars
    )  # of a cond, the index of its branch
    parts = [needed_only(open_jaxpr(body), outs) for body in bodies]
    reads = sorted(set().union(*(reads for _, reads in parts)))
    numbers = [
        (branch, v)
        for branch, (body, (part, _)) in enumerate(zip(bodies, parts, strict=True))
        for v in shared_scalars(part.eqns, open_jaxpr(body))
    ]
    zeros = {v: jex_core.Literal(np.zeros((), v.aval.dtype), v.aval) for _, v in numbers}
    narrow = tuple(
        ClosedJaxpr(
            jaxpr.replace(
                invars=[jaxpr.invars[i] for i in reads],
                outvars=[*jaxpr.outvars, *(v if of == i else zeros[v] for of, v in numbers)],
            ),
            getattr(body, "consts", ()),
        )
        for i, (body, (jaxpr, _)) in enumerate(zip(bodies, parts, strict=True))
    )
    params |= {"branches": narrow} if "branches" in params else {"jaxpr": narrow[0]}
    for key in {"donated_invars", "in_shardings", "in_layouts"} & params.keys():
        params[key] = tuple(params[key][i] for i in reads)
    for key in {"out_shardings", "out_layouts"} & params.keys():
        params[key] = tuple(params[key][i] for i in (*outs, *[0] * len(numbers)))
    return eqn.replace(
        invars=[*eqn.invars[:before], *(eqn.invars[before + i] for i in reads)],
        outvars=[*(eqn.outvars[i] for i in outs), *(jex_core.Var(v.aval) for _, v in numbers)],
        params=params,
    )


def shared_scalars(eqns: Sequence[Any], jaxpr: Any) -> list[Any]:
    """Returns the scalars that some equations of a jaxpr compute or read, and other equations read too.

    XLA fuses a scalar that has one reader into its loop, where a power or a division may differ in the
    last bit. So a part of a program returns these scalars, although nobody uses them.
    """
    here, all_ = (Counter(v for e in of for v in variables(e.invars)) for of in (eqns, jaxpr.eqns))
    computed = outputs_of(jaxpr.eqns)
    of_conds = [v for eqn in eqns for v in eqn.outvars if v not in computed]
    return [*(v for v, n in here.items() if v.aval.shape == () and n < all_[v]), *of_conds]


def needed_only(jaxpr: Any, outs: Sequence[int]) -> tuple[Any, set[int]]:
    """Returns a jaxpr with only some outputs, without dead code, and which inputs it still needs."""

    def part_of(eqn: Any, needed: set[Any]) -> Any:
        kept = [i for i, v in enumerate(eqn.outvars) if v in needed]
        is_part = len(kept) < len(eqn.outvars) and eqn.primitive.name in {"cond", "jit"}
        return narrowed(eqn, kept) if is_part else eqn

    atoms = [jaxpr.outvars[i] for i in outs]
    eqns = equations_before(jaxpr.eqns, atoms, part_of)
    needed = set(variables([*inputs_of(eqns), *atoms]))
    reads = {i for i, v in enumerate(jaxpr.invars) if v in needed}
    return jaxpr.replace(outvars=atoms, eqns=eqns), reads
