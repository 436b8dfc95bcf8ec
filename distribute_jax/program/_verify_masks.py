"""Steps with dropout under ``verify``: every mask is the same number compared with the same probability.

A draw of each replica can equal none of one device. But what is drawn for a mask matters only to the mask, so
the comparison runs the step, on the replicas and on one device, with the same number in place of every draw.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._mesh import DATA
from distribute_jax.program._jaxprs import RANDOM, RenamedAxis, equations, with_inner
from distribute_jax.program._trace import Traced
from distribute_jax.program._walk import STRUCTURE, Marks, Walk


def with_equal_masks(traced: Traced) -> Traced:
    """Returns a step with equal masks; the same step if it draws nothing, or other than for masks."""
    closed = traced.jaxpr
    if not draws(closed.jaxpr) or not _draws_only_masks(closed):
        return traced
    return replace(traced, jaxpr=_EqualMasks().closed(closed), has_equal_masks=True)


def draws(jaxpr: Any) -> bool:
    """True if a program draws random numbers, rather than only advances a stream."""
    return any(eqn.primitive.name in RANDOM for eqn in equations(jaxpr))


def _draws_only_masks(closed: Any) -> bool:
    walk = _DrawWalk()
    outs = walk.run(closed, [_DATA] * len(closed.jaxpr.invars))
    return walk.only_masks and not any(mark & _DRAWN for mark in outs)


_DATA, _DRAWN = 1, 2
"""The bits of a mark: what a value is computed from. Constants have none."""

_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


class _DrawWalk(Walk):
    """Finds out whether drawn numbers meet data only in comparisons, which make masks."""

    only_masks = True

    def constant(self, value: Any) -> int:
        return 0

    def joined(self, eqn: Any, one: int, other: int) -> int:
        return one | other

    def decided(self, eqn: Any, by: int, outs: Marks) -> Marks:
        return [self._met(out | by) for out in outs]

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        name = eqn.primitive.name
        if name == "random_bits":
            return [_DRAWN]
        # With equal numbers a loop that draws until they fit would never end.
        draws = any(inner.primitive.name in RANDOM for inner in with_inner(eqn))
        if name in STRUCTURE and not (draws and name == "while"):
            outs = self.by_rule(STRUCTURE[name], eqn, marks)
            if outs is not None:
                return outs
        mark = reduce(or_, marks, 0)
        mark = _DATA if mark and name in _COMPARISONS else self._met(mark)
        self.only_masks &= not draws
        return [mark] * len(eqn.outvars)

    def _met(self, mark: int) -> int:
        self.only_masks &= mark != _DATA | _DRAWN
        return mark


_UNIFORM = 0.45
"""What every mask compares: dropout keeps all with rates up to 0.5, also if it draws what to drop."""


class _EqualMasks(RenamedAxis):
    """Replaces the bits of every draw."""

    def __init__(self) -> None:
        super().__init__(DATA, DATA)

    def equation(self, eqn: Any) -> Any:
        if eqn.primitive.name != "random_bits":
            return super().equation(eqn)
        [keys], [bits] = eqn.invars, eqn.outvars
        shape, dtype = bits.aval.shape, bits.aval.dtype
        number = int(_UNIFORM * 2 ** (8 * dtype.itemsize))
        # The call keeps the key as an operand, so that the inputs of the program stay the same.
        fixed = jax.jit(lambda keys: jnp.full(shape, number, dtype))
        traced = jax.make_jaxpr(fixed)(jax.ShapeDtypeStruct(keys.aval.shape, keys.aval.dtype))
        [call] = traced.eqns
        return call.replace(invars=[keys], outvars=[bits], source_info=eqn.source_info)
