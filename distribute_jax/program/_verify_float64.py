"""Runs a traced step in float64, where rounding errors are too small to hide or to imitate a difference.

The equations of the trace are evaluated again, so that dtypes in the user's code do not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import on_host, put, replicas_per_device
from distribute_jax._messages import is_key
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._jaxprs import (
    ClosedJaxpr,
    bodies,
    initial_values,
    is_literal,
    open_jaxpr,
    run_bodies,
)
from distribute_jax.program._lowerings import compile_shard_map, flat_step
from distribute_jax.program._replica_scan import scan_replicas
from distribute_jax.program._trace import Call

Run = Callable[[list[Any]], list[Any]]


class NotInFloat64Error(Exception):
    """An equation of the step cannot be computed in float64."""


def in_float64(
    call: Call, entry: BoundProgram, flat: Sequence[Any], *, inexact_terms: bool = False
) -> tuple[Run, list[Any]]:
    """Returns the step compiled in float64, and its inputs; ``jax.enable_x64(True)`` must be set.

    With ``inexact_terms`` the terms of every sum get random errors in their last digits, which depend on the
    inputs. Nudging the inputs then shows the rounding of sums whose terms do not depend on the inputs, such
    as the signs in the gradient of an absolute error, which may cancel.

    Raises:
        NotInFloat64Error: an equation cannot be computed in float64.
    """
    program = entry.program
    step = flat_step(
        call,
        program.traced,
        program.plan,
        program.order,
        call.binding.captured_arrays(),
        functools.partial(_evaluating, inexact_terms),
    )
    where = step.shardings.in_shardings(step.mesh)
    inputs = [put(_on_host(x), to) for x, to in zip(flat, where, strict=True)]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    step = replace(step, avals=avals, runs_once=True)
    compiled = compile_shard_map(
        scan_replicas(step) if replicas_per_device(step.mesh) > 1 else step
    )
    return lambda flat: compiled(*flat), inputs


def _on_host(x: Any) -> Any:
    if is_key(x):
        return x
    array = on_host(x)
    # A Python int was traced as int32.
    narrow = isinstance(x, int) and not isinstance(x, bool)
    return array.astype(np.int32 if narrow else wide(array.dtype))


def wide(dtype: Any) -> Any:
    """Returns float64 for a floating dtype, complex128 for a complex one, else the dtype itself."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _evaluating(inexact_terms: bool, jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    def evaluate(*inputs: Any) -> list[Any]:
        numbers = [x for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
        total = sum(jnp.sum(x.astype(jnp.float64)) for x in numbers if inexact_terms)
        return evaluated(jaxpr, inputs, _ANGLE_SCALE * total if inexact_terms else None)

    return evaluate


_ANGLE_SCALE = 1e16
"""Large enough that a change in the last digit of the sum of inputs makes another angle."""
_SUMS = {"add", "add_any", "sub", "reduce_sum", "cumsum", "dot_general", "conv_general_dilated"}
_JUMPS = {"ceil", "eq", "floor", "ge", "gt", "le", "lt", "ne"}
_WHOLE_ERROR = 1e-10
_TERM_ERROR = 2.0**-44
"""More than the rounding error of a sum in float64, and far less than a difference that matters."""


def _inexact(x: Any, seed: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    angles = seed + 12.9898 * jnp.arange(x.size, dtype=jnp.float64)
    return x * (1 + _TERM_ERROR * jnp.sin(angles).reshape(x.shape))


def _jumps(eqn: Any) -> bool:
    """True if an equation makes a position, or a choice, of a number that may be whole."""
    name, [out, *_] = eqn.primitive.name, eqn.outvars
    return name in _JUMPS or (name == "convert_element_type" and out.aval.dtype.kind in "iu")


def _whole(x: Any) -> Any:
    """Returns a number without its random error where it is a whole number but for that."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    near = jnp.round(x)
    return jnp.where(jnp.abs(x - near) <= _WHOLE_ERROR * jnp.maximum(jnp.abs(near), 1), near, x)


def evaluated(jaxpr: Any, inputs: Sequence[Any], seed: Any = None) -> list[Any]:
    """Evaluates a jaxpr with every floating number in float64; with a ``seed`` sums have inexact terms."""
    values = {v: _widened(x) for v, x in initial_values(jaxpr, inputs).items()}

    def read(var: Any) -> Any:
        return np.asarray(var.val, wide(var.aval.dtype)) if is_literal(var) else values[var]

    run = functools.partial(evaluated, seed=seed)
    for eqn in open_jaxpr(jaxpr).eqns:
        name, operands = eqn.primitive.name, list(map(read, eqn.invars))
        if seed is not None and name in _SUMS:
            operands = [_inexact(x, seed) for x in operands]
        if seed is not None and _jumps(eqn):
            operands = list(map(_whole, operands))
        of_bodies = None if name in _RULES else run_bodies(eqn, run, operands)
        outs = _RULES.get(name, _bound)(eqn, operands) if of_bodies is None else of_bodies
        values.update(zip(eqn.outvars, map(_widened, outs), strict=True))
    return list(map(read, open_jaxpr(jaxpr).outvars))


def _widened(x: Any) -> Any:
    dtype = wide(x.dtype)
    if dtype == x.dtype:
        return x
    return jax.lax.convert_element_type(x, dtype) if isinstance(x, jax.Array) else x.astype(dtype)


def _bound(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Applies the primitive to wide operands; one with bodies that no rule knows keeps its dtypes."""
    if any(not hasattr(var.aval, "dtype") for var in (*eqn.invars, *eqn.outvars)):
        raise NotInFloat64Error(eqn.primitive.name)  # a reference, or a token
    if any(True for _ in bodies(eqn.params.values())):
        return _narrow(eqn, values)
    params = {name: _wide_parameter(name, value) for name, value in eqn.params.items()}
    try:
        return _outputs(eqn, eqn.primitive.bind(*values, **params))
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return _narrow(eqn, values)


def _wide_parameter(name: str, value: Any) -> Any:
    if name == "precision":
        return None
    try:
        is_type = name.endswith(("dtype", "element_type")) and value is not None
        return wide(np.dtype(value)) if is_type else value
    except TypeError:  # an extended dtype, such as that of keys
        return value


def _narrow(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Applies the primitive in its own dtypes."""
    pairs = zip(values, (v.aval.dtype for v in eqn.invars), strict=True)
    inputs = [x if x.dtype == to else jax.lax.convert_element_type(x, to) for x, to in pairs]
    return _outputs(eqn, eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params)))


def _outputs(eqn: Any, outs: Any) -> Sequence[Any]:
    return outs if eqn.primitive.multiple_results else [outs]


def _scatter(eqn: Any, values: list[Any]) -> Sequence[Any]:
    # The scalar function among its parameters has the narrow dtype; jax.lax makes a wide one.
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    scatter = getattr(jax.lax, eqn.primitive.name.replace("-", "_"))
    return [scatter(*values, **{name: eqn.params[name] for name in names})]


_SCATTERS = ("add", "sub", "mul", "min", "max")

_RULES: dict[str, Callable[[Any, list[Any]], Sequence[Any]]] = {
    **{f"scatter-{name}": _scatter for name in _SCATTERS},
    # Bitwise operations and callbacks get the original dtype.
    **dict.fromkeys(("bitcast_convert_type", "pure_callback", "io_callback", "ffi_call"), _narrow),
    "cross_device_sum": _narrow,
    "reduce_precision": lambda eqn, values: values,
}
"""The rules of equations that depend on the dtype of their operands."""
