"""Programs that travel: the parts of a step as bytes, for processes that hold none of the user's code.

The bytes are a line of JSON, with the types of what a program takes and returns, and the StableHLO that
``jax.export`` makes. No Python travels, and nothing is unpickled. A program runs with the version of JAX that
made it, since another may compile it to other numbers. Random keys travel as ``jax.random.key_data``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from distribute_jax._errors import ArgumentError, LoweringError, ProcessesDifferError
from distribute_jax.program._jaxprs import equations, line, name
from distribute_jax.program._part import Part
from distribute_jax.program._rows import filled

_FORMAT = "distribute_jax program 1"

_CALLBACK = """\
{what} at {where} calls Python in this process, and the step runs in another one, which has none of this \
program's code. Return the value from the step and print it here, or use engine="threads"."""

_REFUSED = """\
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
    """A program that came as bytes; it is called as the ``Part`` that it was."""

    call: Callable[..., Sequence[jax.Array]]
    takes: Sequence[Any]
    """The types of what it takes."""
    wanted: int
    """How many of its results count."""
    touched: tuple[int, ...]

    def __call__(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        return self._run(self.compiled, state, values)

    def in_place(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        """As of ``Part``."""
        return self._run(self._donating, state, values)

    def _run(self, compiled: Any, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        taken = map(filled, [*state, *values], self.takes)
        return list(compiled(*taken)[: self.wanted])

    @functools.cached_property
    def compiled(self) -> Any:
        """The program, compiled."""
        return jax.jit(self.call).lower(*self.takes).compile()

    @functools.cached_property
    def _donating(self) -> Any:
        return jax.jit(self.call, donate_argnums=self.touched).lower(*self.takes).compile()


def export_part(part: Part, platforms: Sequence[str]) -> bytes:
    """Returns a program as bytes that ``load_part`` takes, for kinds of devices such as ``"cpu"``.

    Raises:
        LoweringError: it calls back into Python, or uses what JAX cannot export.
    """
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
        raise LoweringError(_REFUSED.format(error=error)) from error
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
    """Returns the program that ``export_part`` made bytes of.

    Raises:
        ArgumentError: the bytes are not a program.
        ProcessesDifferError: it is for another version of JAX, or for other devices.
    """
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
    # A program of the same types: JAX's own bytes of it would need another package.
    like = jax.jit(lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in returns])
    exported = replace(
        export.export(like, platforms=platforms)(*takes),
        mlir_module_serialized=body,
        module_kept_var_idx=kept,
    )
    try:
        loaded = LoadedPart(exported.call, takes, wanted, touched)
        _ = loaded.compiled
    except Exception as error:  # whatever a parser meets in bytes that are damaged
        raise ArgumentError(_NOT_OURS.format(size=len(data))) from error
    return loaded


def _type(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(map(int, shape)), jnp.dtype(dtype))


def _is_key(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _numbers_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of the numbers that a key is, and other types as they are."""
    plain = jax.eval_shape(as_numbers, aval)
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype)


_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
"""Compiled ahead of time, programs do not take arrays of what several of share a byte (JAX 0.10.2)."""


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
