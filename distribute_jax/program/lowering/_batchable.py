"""What JAX cannot run as a ``vmap`` over the replicas, or only with other numbers, is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend.core as jex_core

from distribute_jax._errors import DistributeError, LoweringError
from distribute_jax._mesh import DATA
from distribute_jax.program.proof._marks import ClosedJaxpr, line, name

Stack = tuple[Any, ...]
"""An equation, after the equations that hold it."""

_LINE = re.compile(r":\d+$")

_REFUSED = """\
RunOptions(lowering="vmap") cannot run {what}: {reason}
This lowering runs the step as a vmap over the replicas. Use RunOptions(lowering="shard_map"), the \
default, which runs every operation."""

_KEYS = "under vmap, keys of this kind ({}) draw other numbers than on each replica by itself"
_ONCE = "under vmap it may run once for all replicas, rather than once on each"


@contextmanager
def refusing_unbatchable(jaxpr: ClosedJaxpr, replicas: int) -> Iterator[None]:
    """Refuses a jaxpr that gives other numbers under ``vmap``, or one that JAX fails to compile so."""
    for stack in equations(jaxpr.jaxpr):
        if reason := other_numbers(stack[-1]):
            raise _refusal(stack, reason)
    try:
        yield
    except (DistributeError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise _refusal(_culprit(jaxpr.jaxpr, replicas), str(error).partition("\n")[0]) from error


def _refusal(stack: Stack, reason: str) -> LoweringError:
    # What JAX's own functions are made of has no line of the user's, but the call around it has.
    lines = [found for eqn in reversed(stack) if _LINE.search(found := line(eqn))]
    what = " at ".join([name(stack[-1]), *lines[:1]]) if stack else "this step"
    return LoweringError(_REFUSED.format(what=what, reason=reason.rstrip(".!") + "."))


def equations(jaxpr: jex_core.Jaxpr, around: Stack = ()) -> Iterator[Stack]:
    """Gives every equation, after those it holds, as the last of the equations that hold it."""
    for eqn in jaxpr.eqns:
        stack = (*around, eqn)
        for inner in jex_core.subjaxprs(jaxpr.replace(eqns=[eqn])):
            yield from equations(inner, stack)
        yield stack


def other_numbers(eqn: Any) -> str | None:
    """Says why an equation by itself would give other numbers than on each replica; None if it does not."""
    primitive = eqn.primitive.name
    if primitive in {"rng_bit_generator", "rng_uniform"}:
        return _KEYS.format(primitive)
    if primitive == "random_bits" and "rbg" in str(eqn.invars[0].aval.dtype):
        return _KEYS.format(eqn.invars[0].aval.dtype)
    return _ONCE if primitive == "io_callback" else None


def _culprit(jaxpr: jex_core.Jaxpr, replicas: int) -> Stack:
    """Finds the first equation that does not work under ``vmap`` by itself."""
    stacks = equations(jaxpr)
    return next((stack for stack in stacks if not _works_alone(jaxpr, stack[-1], replicas)), ())


def _works_alone(jaxpr: jex_core.Jaxpr, eqn: Any, replicas: int) -> bool:
    reads = dict.fromkeys(v for v in eqn.invars if not isinstance(v, jex_core.Literal))
    if not all(isinstance(v.aval, jax.core.ShapedArray) for v in (*reads, *eqn.outvars)):
        return True  # a ref cannot leave the program that made it
    alone = jaxpr.replace(constvars=[], invars=list(reads), outvars=eqn.outvars, eqns=[eqn])
    step = jax.vmap(
        jex_core.jaxpr_as_fun(ClosedJaxpr(alone, ())),
        axis_name=DATA,
        axis_size=replicas,
        spmd_axis_name=DATA,
    )
    inputs = [jax.ShapeDtypeStruct((replicas, *v.aval.shape), v.aval.dtype) for v in reads]
    try:
        jax.eval_shape(step, *inputs)
    except Exception:
        return False
    return True
