"""Programs of workers and servers: some equations of a step, compiled for one device, and serialized.

A serialized program is a line of JSON, with the types of inputs and outputs, and the StableHLO of
``jax.export``. It needs none of the user's code, contains no Python, and nothing is unpickled. It runs only
with the version of JAX that made it, since another may compile it to other numbers. Random keys are sent as
``jax.random.key_data``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import export

from distribute_jax._errors import ArgumentError, LoweringError, ProcessesDifferError
from distribute_jax._mesh import DATA, inside_replica, num_replicas
from distribute_jax.program._jaxprs import (
    Values,
    equations,
    initial_values,
    line,
    name,
    open_jaxpr,
    value_of,
    without_axis,
)
from distribute_jax.program._rows import Ids, Needs, Rows, filled
from distribute_jax.program._trace import Call


@dataclass(frozen=True, eq=False)
class Part:
    """A program for one device; only ``in_place`` donates."""

    jitted: Callable[[Sequence[Any], Sequence[Any]], list[jax.Array]]
    """Takes state and other values; may return more than ``returns``."""
    state: tuple[jax.ShapeDtypeStruct, ...]
    """The types of state inputs."""
    values: tuple[jax.ShapeDtypeStruct, ...]
    """The types of other inputs."""
    returns: tuple[jax.ShapeDtypeStruct, ...]
    """The types of outputs."""
    jaxpr: Any
    touched: tuple[int, ...]
    """The indices of state of which only some rows change."""
    by_rows: bool
    """Whether values may come without trailing zeros."""

    def __call__(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        if self.by_rows:
            values = [*map(filled, values, self.values)]
        return self._returned(self.jitted(state, values))

    def in_place(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        """Returns the same, and donates the ``touched`` state."""
        donated = [state[i] for i in self.touched]
        rest = [None if i in self.touched else x for i, x in enumerate(state)]
        return self._returned(self._donating(donated, rest, [*map(filled, values, self.values)]))

    @functools.cached_property
    def _donating(self) -> Callable[..., list[jax.Array]]:
        def run(donated: Sequence[Any], rest: Sequence[Any], values: Sequence[Any]) -> Any:
            flow = iter(donated)
            state = [next(flow) if i in self.touched else x for i, x in enumerate(rest)]
            return self.jitted(state, values)

        return jax.jit(run, donate_argnums=0)

    def _returned(self, outs: list[jax.Array]) -> list[jax.Array]:
        # Drops the sharding over the mesh of the trace, which no other array has.
        return [out.addressable_data(0) for out in outs[: len(self.returns)]]


Some = tuple[Any, Rows | Ids | None]
"""A variable of the program, and which rows of it; None for all."""


def all_of(some: Iterable[Any]) -> list[Some]:
    """Returns the values with all their rows."""
    return [(v, None) for v in some]


def build_part(
    call: Call,
    body: Any,
    needs: Needs,
    takes: tuple[Sequence[Some], Sequence[Some]],
    outs: Sequence[Some],
    shared: Sequence[Any] = (),
    ids: Sequence[Ids] = (),
    touched: Mapping[Any, Any] = MappingProxyType({}),
    by_first: Collection[Any] = (),
) -> Part:
    """Compiles some equations for one device.

    Args:
        call: the step.
        body: the program that has the equations.
        needs: the equations, and which rows they compute.
        takes: state inputs, and other inputs.
        outs: the outputs.
        shared: scalars that are returned too, only so that XLA rounds them as in the step.
        ids: lookups whose row ids the program takes after its other inputs.
        touched: the old value of each new value of which only the computed rows change.
        by_first: values that replicas other than the first replace by zero, so that their sum is the value.
    """
    jaxpr = open_jaxpr(body)
    inputs = [*takes[0], *takes[1]]

    def run(*values: Any) -> list[Any]:
        known, some = initial_values(body, [None] * len(jaxpr.invars)), Values()
        inputs_by_var = dict(zip((v for v, _ in inputs), values[: len(inputs)], strict=True))
        for of, plus_one in zip(ids, values[len(inputs) :], strict=True):
            of.set(plus_one)
        for v, rows in inputs:
            _start(needs, v, rows, inputs_by_var[v], known, some)
        needs.run(jaxpr, known, some)
        more = jax.lax.optimization_barrier([known[v] for v in shared])
        for v in by_first:  # -0.0 + x is x for every x
            nothing = jnp.full_like(known[v], -0.0)
            known[v] = jnp.where(known[jaxpr.invars[0]] == 0, known[v], nothing)

        def result(v: Any, rows: Rows | Ids | None) -> Any:
            if not isinstance(v, jex_core.Literal) and v in touched:
                of: Any = needs.rows[v]
                return of.put(inputs_by_var[touched[v]], some[v])
            if rows is None:
                return value_of(v, known)
            return some[v] if v in some else rows.of(known[v])

        return [*(jnp.asarray(result(v, rows)) for v, rows in outs), *more]

    numbers = [jax.ShapeDtypeStruct((rows.number,), jnp.int32) for rows in ids]
    with jax.sharding.use_abstract_mesh(inside_replica(call.mesh)):
        closed = jax.make_jaxpr(run, axis_env=[(DATA, num_replicas(call.mesh))])(
            *map(_like, inputs), *numbers
        )
    whole = without_axis(closed)
    function = jex_core.jaxpr_as_fun(whole)

    def part(state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        outs: list[jax.Array] = function(*state, *values)
        return outs

    state, values = (tuple(map(_like, some)) for some in takes)
    donated = set(touched.values())
    return Part(
        jitted=jax.jit(part),
        state=state,
        values=(*values, *numbers),
        returns=tuple(map(_like, outs)),
        jaxpr=whole,
        touched=tuple(i for i, (v, _) in enumerate(takes[0]) if v in donated),
        by_rows=bool(ids),
    )


def _start(needs: Needs, v: Any, rows: Any, value: Any, known: Values, some: Values) -> None:
    """Adds an input to the initial values: the rows that are needed, or all."""
    wanted: Any = None if v in needs.whole else needs.rows.get(v)
    if isinstance(rows, Ids) and wanted is not rows:
        value = rows.put(jnp.zeros((rows.rows.stop, *value.shape[1:]), value.dtype), value)
        rows = rows.whole
    elif isinstance(wanted, Ids) and wanted is not rows:
        value, rows = wanted.of(value), wanted
    (known if rows is None else some)[v] = value


def _like(pair: Some) -> jax.ShapeDtypeStruct:
    v, rows = pair
    aval, weak = v.aval, getattr(v.aval, "weak_type", False)
    shape = aval.shape if rows is None else rows.shape(aval.shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)


_FORMAT = "distribute_jax program 1"

_CALLBACK = """\
{what} at {where} calls Python in this process, and the step runs in another one, which has none of this \
program's code. Return the value from the step and print it here, or use engine="threads"."""

_NOT_EXPORTABLE = """\
A step cannot be sent to another process: {error}
Steps of engine="threads" stay in this one."""

_NOT_OURS = "These {size} bytes are not a program of distribute_jax."

_VERSIONS = """\
A step was compiled with JAX {theirs}, and this process has JAX {ours}. Install the same version for the \
coordinator, the workers and the servers: pip install jax=={theirs}."""

_PLATFORMS = """\
A step was compiled for {theirs}, and this process computes on {ours}. All workers need one kind of device, \
and so do all servers; JAX_PLATFORMS={first} chooses it."""


@dataclass(frozen=True, eq=False)
class LoadedPart:
    """A program that was loaded from bytes; called like a ``Part``."""

    call: Callable[..., Sequence[jax.Array]]
    takes: Sequence[Any]
    """The types of inputs."""
    wanted: int
    """The number of outputs that are returned."""
    touched: tuple[int, ...]

    def __call__(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        return self._run(self.compiled, state, values)

    def in_place(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        """Returns the same, and donates the ``touched`` state."""
        return self._run(self._donating, state, values)

    def _run(self, compiled: Any, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        inputs = map(filled, [*state, *values], self.takes)
        return list(compiled(*inputs)[: self.wanted])

    @functools.cached_property
    def compiled(self) -> Any:
        """The program, compiled."""
        return jax.jit(self.call).lower(*self.takes).compile()

    @functools.cached_property
    def _donating(self) -> Any:
        return jax.jit(self.call, donate_argnums=self.touched).lower(*self.takes).compile()


def export_part(part: Part, platforms: Sequence[str]) -> bytes:
    """Serializes a program for platforms such as ``"cpu"``."""
    for eqn in equations(part.jaxpr.jaxpr):
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            raise LoweringError(_CALLBACK.format(what=name(eqn), where=line(eqn)))

    types = (*part.state, *part.values)

    def flat(*values: Any) -> list[jax.Array]:
        keys = [as_key(x, like) for x, like in zip(values, types, strict=True)]
        return [
            as_numbers(x) for x in part.jitted(keys[: len(part.state)], keys[len(part.state) :])
        ]

    try:
        exported = export.export(jax.jit(flat), platforms=tuple(platforms))(
            *map(_numbers_of, types)
        )
    except (ValueError, NotImplementedError) as error:
        raise LoweringError(_NOT_EXPORTABLE.format(error=error)) from error
    head = {
        "format": _FORMAT,
        "jax": jax.__version__,
        "platforms": list(platforms),
        "takes": [(aval.shape, str(aval.dtype)) for aval in exported.in_avals],
        "returns": [(aval.shape, str(aval.dtype)) for aval in exported.out_avals],
        "kept": exported.module_kept_var_idx,
        "wanted": len(part.returns),
        "touched": part.touched,
    }
    return json.dumps(head).encode() + b"\n" + exported.mlir_module_serialized


def load_part(data: bytes) -> LoadedPart:
    """Loads a program from ``export_part``, made with this version of JAX for this platform."""
    head, _, body = bytes(data).partition(b"\n")
    try:
        facts = json.loads(head)
        theirs, platforms = str(facts["jax"]), tuple(map(str, facts["platforms"]))
        takes, returns = ([_type(*of) for of in facts[key]] for key in ("takes", "returns"))
        kept, wanted = tuple(map(int, facts["kept"])), int(facts["wanted"])
        touched = tuple(map(int, facts["touched"]))
        is_ours = facts["format"] == _FORMAT and bool(platforms) and bool(body)
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(_NOT_OURS.format(size=len(data))) from error
    if not is_ours:
        raise ArgumentError(_NOT_OURS.format(size=len(data)))
    if theirs != jax.__version__:
        raise ProcessesDifferError(_VERSIONS.format(theirs=theirs, ours=jax.__version__))
    ours = export.default_export_platform()
    if ours not in platforms:
        text = _PLATFORMS.format(theirs=", ".join(platforms), ours=ours, first=platforms[0])
        raise ProcessesDifferError(text)
    # Exported.deserialize would need the package flatbuffers: export a program of the same types instead.
    like = jax.jit(lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in returns])
    exported = replace(
        export.export(like, platforms=platforms)(*takes),
        mlir_module_serialized=body,
        module_kept_var_idx=kept,
    )
    try:
        loaded = LoadedPart(exported.call, takes, wanted, touched)
        _ = loaded.compiled
    except Exception as error:  # a parser may raise anything on damaged bytes
        raise ArgumentError(_NOT_OURS.format(size=len(data))) from error
    return loaded


def _type(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(map(int, shape)), jnp.dtype(dtype))


def _is_key(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _numbers_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a value as it is sent."""
    plain = jax.eval_shape(as_numbers, aval)
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype)


_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
"""Programs compiled ahead of time do not take arrays of sub-byte dtypes (JAX 0.10.2)."""


def as_numbers(value: Any) -> Any:
    if (wider := _WIDER.get(str(value.dtype))) is not None:
        return value.astype(wider)
    return jax.random.key_data(value) if _is_key(value) else value


def as_key(value: Any, like: Any) -> Any:
    if not _is_key(like):
        return value.astype(like.dtype) if str(like.dtype) in _WIDER else value
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(value, impl=kinds[0])
