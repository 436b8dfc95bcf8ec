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

from distribute_jax._errors import LoweringError, ProcessesDifferError
from distribute_jax._mesh import DATA, inside_replica, num_replicas
from distribute_jax._messages import as_numbers, from_numbers
from distribute_jax.program._jaxprs import (
    equations,
    is_literal,
    line,
    name,
    open_jaxpr,
    without_axis,
)
from distribute_jax.program._trace import Call
from distribute_jax.servers._rows import Computed, Needs, RowIds, Rows, Selected, filled


@dataclass(frozen=True, eq=False)
class DeviceProgram:
    """A program for one device, made here or loaded; only ``in_place`` donates."""

    function: Callable[..., Sequence[jax.Array]]
    """Takes state, then other values; may return more than ``returns``."""
    state: tuple[jax.ShapeDtypeStruct, ...]
    """The types of state inputs."""
    values: tuple[jax.ShapeDtypeStruct, ...]
    """The types of other inputs, which may come without trailing zeros."""
    returns: tuple[jax.ShapeDtypeStruct, ...]
    """The types of outputs."""
    touched: tuple[int, ...]
    """The indices of state of which only some rows change."""
    jaxpr: Any = None
    """None if it was loaded."""

    def __call__(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        return self._run(self._jitted, state, values)

    def in_place(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        """Returns the same, and donates the ``touched`` state."""
        return self._run(self._donating, state, values)

    @functools.cached_property
    def _jitted(self) -> Any:
        return jax.jit(self.function)

    @functools.cached_property
    def _donating(self) -> Any:
        return jax.jit(self.function, donate_argnums=self.touched)

    def _run(self, jitted: Any, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        outs = jitted(*state, *map(filled, values, self.values))[: len(self.returns)]
        # Drops the sharding over the mesh of the trace, which no other array has.
        return [out.addressable_data(0) for out in outs]


def whole(values: Iterable[Any]) -> list[Selected]:
    """Selects all rows of values."""
    return [(v, None) for v in values]


def build_device_program(
    call: Call,
    body: Any,
    needs: Needs,
    state: Sequence[Selected],
    values: Sequence[Selected],
    outs: Sequence[Selected],
    shared: Sequence[Any] = (),
    touched: Mapping[Any, Any] = MappingProxyType({}),
    by_first: Collection[Any] = (),
) -> DeviceProgram:
    """Compiles some equations of a step for one device; ``body`` is the program that has them.

    The inputs are ``state``, other ``values``, and then the row ids of lookups. ``shared`` scalars are
    returned too, only so that XLA rounds them as in the step. ``touched`` has the old value of each new value
    of which only the computed rows change. Replicas other than the first replace the values ``by_first`` by
    zero, so that their sum is the value.
    """
    inputs = [*state, *values]
    lookups = dict.fromkeys(rows for _, rows in inputs if isinstance(rows, RowIds))

    def run(*arrays: Any) -> list[Any]:
        of_input = dict(zip((v for v, _ in inputs), arrays, strict=False))
        for ids, plus_one in zip(lookups, arrays[len(inputs) :], strict=True):
            ids.set(plus_one)
        computed = Computed(body, needs)
        for v, rows in inputs:
            computed.add(v, rows, of_input[v])
        computed.run()
        more = jax.lax.optimization_barrier(list(map(computed.of, shared)))

        def result(v: Any, rows: Rows | RowIds | None) -> Any:
            if not is_literal(v) and v in touched:
                ids: Any = needs.rows[v]
                return ids.put(of_input[touched[v]], computed.of(v, ids))
            value = computed.of(v, rows)
            if not is_literal(v) and v in by_first:  # -0.0 + x is x for every x
                is_first = computed.of(open_jaxpr(body).invars[0]) == 0
                return jnp.where(is_first, value, jnp.full_like(value, -0.0))
            return value

        return [*(jnp.asarray(result(v, rows)) for v, rows in outs), *more]

    types = [*map(_type_of, inputs)]
    numbers = [jax.ShapeDtypeStruct((ids.number,), jnp.int32) for ids in lookups]
    with jax.sharding.use_abstract_mesh(inside_replica(call.mesh)):
        axes = [(DATA, num_replicas(call.mesh))]
        program = without_axis(jax.make_jaxpr(run, axis_env=axes)(*types, *numbers))
    function = jex_core.jaxpr_as_fun(program)

    def part(*arrays: Any) -> list[jax.Array]:
        results: list[jax.Array] = function(*arrays)
        return results

    changed = tuple(i for i, (v, _) in enumerate(state) if v in set(touched.values()))
    first, others = tuple(types[: len(state)]), (*types[len(state) :], *numbers)
    return DeviceProgram(part, first, others, tuple(map(_type_of, outs)), changed, program)


def _type_of(selected: Selected) -> jax.ShapeDtypeStruct:
    v, rows = selected
    aval, weak = v.aval, getattr(v.aval, "weak_type", False)
    shape = aval.shape if rows is None else rows.shape(aval.shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)


_CALLBACK = """\
{what} at {where} calls Python in this process, and the step runs in another one, which has none of this \
program's code. Return the value from the step and print it here, or use engine="threads"."""

_NOT_EXPORTABLE = """\
A step cannot be sent to another process: {error}
Steps of engine="threads" stay in this one."""

_VERSIONS = """\
A step was compiled with JAX {theirs}, and this process has JAX {ours}. Install the same version for the \
coordinator, the workers and the servers: pip install jax=={theirs}."""

_PLATFORMS = """\
A step was compiled for {theirs}, and this process computes on {ours}. All workers need one kind of device, \
and so do all servers; JAX_PLATFORMS={first} chooses it."""


def export_program(part: DeviceProgram, platforms: Sequence[str]) -> bytes:
    """Serializes a program for platforms such as ``"cpu"``."""
    for eqn in equations(part.jaxpr.jaxpr):
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            raise LoweringError(_CALLBACK.format(what=name(eqn), where=line(eqn)))

    types = (*part.state, *part.values)

    def flat(*values: Any) -> list[jax.Array]:
        return list(map(as_numbers, part.function(*map(from_numbers, values, types))))

    try:
        exported = export.export(jax.jit(flat), platforms=tuple(platforms))(
            *map(_numbers_of, types)
        )
    except (ValueError, NotImplementedError) as error:
        raise LoweringError(_NOT_EXPORTABLE.format(error=error)) from error
    head = {
        "jax": jax.__version__,
        "platforms": list(platforms),
        "state": len(part.state),
        "takes": [(aval.shape, str(aval.dtype)) for aval in exported.in_avals],
        "returns": [(aval.shape, str(aval.dtype)) for aval in exported.out_avals],
        "kept": exported.module_kept_var_idx,
        "wanted": len(part.returns),
        "touched": part.touched,
    }
    return json.dumps(head).encode() + b"\n" + exported.mlir_module_serialized


def load_program(data: bytes) -> DeviceProgram:
    """Loads a program from ``export_program``, made with this version of JAX for this platform."""
    head, _, body = data.partition(b"\n")
    facts = json.loads(head)
    if (theirs := facts["jax"]) != jax.__version__:
        raise ProcessesDifferError(_VERSIONS.format(theirs=theirs, ours=jax.__version__))
    platforms, ours = facts["platforms"], export.default_export_platform()
    if ours not in platforms:
        text = _PLATFORMS.format(theirs=", ".join(platforms), ours=ours, first=platforms[0])
        raise ProcessesDifferError(text)
    # Exported.deserialize would need the package flatbuffers: export a program of the same types instead.
    takes, returns = ([_type(*of) for of in facts[key]] for key in ("takes", "returns"))
    like = jax.jit(lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in returns])
    exported = replace(
        export.export(like, platforms=platforms)(*takes),
        mlir_module_serialized=body,
        module_kept_var_idx=tuple(facts["kept"]),
    )
    state, values = tuple(takes[: facts["state"]]), tuple(takes[facts["state"] :])
    outs, touched = tuple(returns[: facts["wanted"]]), tuple(facts["touched"])
    return DeviceProgram(exported.call, state, values, outs, touched)


def _type(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _numbers_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a value as it is sent."""
    plain = jax.eval_shape(as_numbers, aval)
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype)
