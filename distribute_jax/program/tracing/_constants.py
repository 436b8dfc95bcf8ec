"""Captured arrays that the binding did not see: never a silent constant."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from flax import nnx

from distribute_jax._errors import StaleCaptureError
from distribute_jax._internals import read_raw
from distribute_jax._tree import leaf_text, listed
from distribute_jax.program.proof._marks import ClosedJaxpr

_LARGEST = 1024
"""Bytes: smaller constants, such as a scale factor, are common and harmless."""


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


def check_constants(jaxpr: ClosedJaxpr, seen: Sequence[Any]) -> None:
    """Raises where a captured array would be frozen into the program unnoticed."""
    replaced = {id(constant) for constant in jaxpr.consts} & {id(array) for array in seen}
    found = [
        constant
        for constant in constants(jaxpr)
        if isinstance(constant, jax.Array) and id(constant) not in replaced
    ]
    small = [constant for constant in found if not _is_suspect(constant)]
    weights = _values_of_variables() if small else set()
    stale = [leaf_text(c) for c in found if _is_suspect(c) or id(c) in weights]
    if stale:
        raise StaleCaptureError(
            "The step uses arrays that it neither got as arguments nor captured in a way that run "
            f"could see:\n{listed(stale)}\nBuilt into the program they would never change again, "
            "and weights among them would never train. Pass the array, or the object that holds "
            "it, in args: strategy.run(step, args=(model, x))."
        )


def _is_suspect(constant: jax.Array) -> bool:
    """Tells whether an array is large, or was placed by a strategy: then it is state."""
    large = constant.size * constant.dtype.itemsize > _LARGEST
    return large or len(constant.sharding.device_set) > 1


def _values_of_variables() -> set[int]:
    """Identifies the arrays of every variable that is alive, however small and wherever made."""
    variables = [x for x in gc.get_objects() if issubclass(type(x), nnx.Variable)]
    return {id(leaf) for raw in read_raw(variables) for leaf in jax.tree.leaves(raw)}
