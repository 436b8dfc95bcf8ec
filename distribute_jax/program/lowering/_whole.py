"""The traced step as one equation, so that no later pass of JAX's traces its hundreds of equations again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.interpreters import mlir

from distribute_jax.program.proof._marks import ClosedJaxpr

_NAME = "replica_step"

step_p: Any = jex_core.Primitive(_NAME)
"""All equations of a step, which become a function of the lowered program as they are."""
step_p.multiple_results = True


def by_equation(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Gives a traced step as a function that is traced to the equations it has."""
    function: Callable[..., list[Any]] = jex_core.jaxpr_as_fun(jaxpr)
    return function


def in_one_equation(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Gives a traced step as a function that ``shard_map`` and ``scan`` trace to one equation.

    A step that prints, calls back or holds refs is traced equation by equation, since JAX looks for
    these in the outermost program; so is one that gets inputs for its constants.
    """
    silent = all(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)
    if not silent or any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
        return by_equation(jaxpr)
    return lambda *inputs: step_p.bind(*inputs, call_jaxpr=jaxpr)


def _lowered(ctx: Any, *inputs: Any, call_jaxpr: ClosedJaxpr) -> Any:
    return mlir.core_call_lowering(ctx, *inputs, name=_NAME, call_jaxpr=call_jaxpr)


step_p.def_abstract_eval(lambda *_, call_jaxpr: call_jaxpr.out_avals)
mlir.register_lowering(step_p, _lowered)
