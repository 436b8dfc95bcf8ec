"""Values of a traced step that are zeros whatever the inputs: gradients of weights that are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from distribute_jax.program.proof._increments import called_body
from distribute_jax.program.proof._marks import ClosedJaxpr

_KEEPS_ZEROS = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p",
    "mirrored", "neg", "optimization_barrier", "part_of_mean", "reduce_sum", "reshape", "squeeze",
    "stop_gradient", "sub", "transpose", "unreduced",
})  # fmt: skip
"""Operations that make zeros of zeros."""


def are_zeros(jaxpr: Any, target: Any) -> bool:
    """Whether all operands of an equation, in or below ``jaxpr``, are zeros wherever it runs."""
    met: list[bool] = []
    _run(jaxpr, [False] * len(jaxpr.jaxpr.invars), target, met)
    return bool(met) and all(met)


def _run(body: Any, inputs: Sequence[bool], target: Any, met: list[bool]) -> list[bool]:
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
        outs = _equation(eqn, operands, target, met)
        zeros.update(v for v, zero in zip(eqn.outvars, outs, strict=True) if zero)
    return [is_zero(atom) for atom in inner.outvars]


def _equation(eqn: Any, operands: list[bool], target: Any, met: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    none = [False] * len(eqn.outvars)
    if (call := called_body(eqn)) is not None:
        outs = _run(call, operands, target, met)
        return outs if len(outs) == len(none) else none
    for body in jex_core.jaxprs_in_params(eqn.params):
        _run(body, [False] * len(body.invars), target, met)
    if name == "mul":
        return [any(operands)]
    if name == "div":
        return [operands[0]]
    return [name in _KEEPS_ZEROS and bool(operands) and all(operands)] * len(none)
