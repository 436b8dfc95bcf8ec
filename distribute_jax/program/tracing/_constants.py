"""Captured arrays that the binding did not see: never a silent constant."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core

from distribute_jax._errors import StaleCaptureError
from distribute_jax._tree import is_key, leaf_text, listed
from distribute_jax.program.binding._capture import is_library
from distribute_jax.program.proof._marks import ClosedJaxpr


def constants(jaxpr: ClosedJaxpr) -> Iterator[Any]:
    """Gives every array that is built into a program, at any depth."""
    yield from jaxpr.consts
    for eqn in jaxpr.jaxpr.eqns:
        for value in eqn.params.values():
            yield from _in_parameter(value)
        for atom in eqn.invars:
            if isinstance(atom, jex_core.Literal):
                yield atom.val


def _in_parameter(value: Any) -> Iterator[Any]:
    if isinstance(value, ClosedJaxpr):
        yield from constants(value)
    elif isinstance(value, jex_core.Jaxpr):
        yield from constants(ClosedJaxpr(value, ()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _in_parameter(item)


def arrays_now() -> set[int]:
    """Identifies every array there is."""
    return set(map(id, jax.live_arrays()))


def check_constants(jaxpr: ClosedJaxpr, inputs: Sequence[Any], older: set[int]) -> None:
    """Raises where an array from before the trace would be built into the program.

    Args:
        jaxpr: the step.
        inputs: the captured arrays that are inputs.
        older: what ``arrays_now`` returned before the trace; what was made since is a constant by its nature.
    """
    replaced = {id(constant) for constant in jaxpr.consts} & {id(array) for array in inputs}
    stale = [
        leaf_text(constant)
        for constant in constants(jaxpr)
        if isinstance(constant, jax.Array)
        and id(constant) not in replaced
        # A key is no plain array, and one made in the step would be traced.
        and (id(constant) in older or is_key(constant))
        and not _belongs_to_library(constant)
    ]
    if stale:
        raise StaleCaptureError(
            "The step uses arrays that it neither got as arguments nor captured in a way that run "
            f"could see:\n{listed(stale)}\nBuilt into the program they would never change again, "
            "and weights among them would never train. Pass the array, or the object that holds "
            "it, in args: strategy.run(step, args=(model, x))."
        )


def _belongs_to_library(constant: jax.Array) -> bool:
    """Whether nothing but globals and closures of libraries hold an array: those do not change."""
    holders = [h for h in gc.get_referrers(constant) if not isinstance(h, types.FrameType)]
    return bool(holders) and all(
        isinstance(holder, types.CellType)
        or (
            isinstance(holder, dict) and is_library(holder.get("__name__")) and "__spec__" in holder
        )
        for holder in holders
    )
