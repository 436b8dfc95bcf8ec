"""Where the parts of a mean go before they are summed over the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax.collectives._part_of_mean import part_of_mean_p
from distribute_jax.program.proof._marks import MIRRORED, Control, Mark, line, union
from distribute_jax.program.proof._prove import Walk
from distribute_jax.program.proof._rules import RULES, Outcome

_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})
_SPREADS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
_KEEPS = _SPREADS | {
    "add", "add_any", "concatenate", "copy", "copy_p", "expand_dims", "neg", "optimization_barrier",
    "reduce_sum", "select_n", "stop_gradient", "sub", "transpose",
}  # fmt: skip
"""Operations after which a part is still a part."""


class Part(str):
    """The mark of a part of a mean: the line that made it."""

    __slots__ = ()


class ScaledPart(Part):
    """The mark of what was computed from a part, and may have been made whole by that."""

    __slots__ = ()


class _Constant(str):
    """The mark of an array whose elements are all this number."""

    __slots__ = ()


@dataclass(frozen=True)
class Parts:
    """What became of the parts of means."""

    outputs: list[frozenset[Part]]
    """For each output of the program, the parts in it."""
    callbacks: list[tuple[str, str]]
    """The lines of callbacks that get a part, with the line that made the part."""


def parts_of_means(jaxpr: Any, *, axis: str = "data", axis_size: int) -> Parts | None:
    """Follows what ``compute_average_loss`` returns; None in a program that does not call it."""
    if not _has_parts(jaxpr.jaxpr):
        return None
    walk = _PartWalk(axis, axis_size)
    outs, _ = walk.run(jaxpr, [MIRRORED] * len(jaxpr.jaxpr.invars), Control())
    return Parts([_parts(mark) for mark in outs], sorted(walk.callbacks))


class _PartWalk(Walk):
    """The pass of the proof, which sums take the marks from, with marks for parts."""

    def __init__(self, axis: str, axis_size: int) -> None:
        super().__init__(axis, axis_size)
        self.callbacks: set[tuple[str, str]] = set()

    def apply(self, eqn: Any, marks: list[Mark], control: Control) -> Outcome:
        """Marks parts, and drops the mark where an operation has made them something else."""
        name = eqn.primitive.name
        if eqn.primitive is part_of_mean_p:
            return Outcome([frozenset({Part(line(eqn))})])
        if name == "cross_device_sum" or self._is_collective(eqn):
            return Outcome([MIRRORED] * len(eqn.outvars))
        if not any(marks) and name not in RULES and name not in _SPREADS:
            return Outcome([MIRRORED] * len(eqn.outvars))
        found = _parts(union(marks))
        if name in _CALLBACKS:
            self.callbacks |= {(line(eqn), str(p)) for p in found if not isinstance(p, ScaledPart)}
        if name in _SPREADS and len(eqn.invars) == 1 and not found:
            return Outcome([_spread(eqn.invars[0], marks[0])])
        outcome = super().apply(eqn, marks, control)
        if name in RULES:
            return outcome
        kept = self._kept(name, eqn, marks) if found else MIRRORED
        real = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars]
        return Outcome([kept if is_real else MIRRORED for is_real in real], outcome.writes)

    def meet(self, eqn: Any, control: Control) -> None:
        """Lets every collective be: whether it may hang was proved before."""

    def _is_collective(self, eqn: Any) -> bool:
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        return self.axis in (named if isinstance(named, tuple) else (named,))

    def _kept(self, name: str, eqn: Any, marks: list[Mark]) -> Mark:
        found = _parts(union(marks))
        if name in _KEEPS:
            return found
        if name in ("mul", "div"):
            factors = [_number(atom, mark) for atom, mark in zip(eqn.invars, marks, strict=True)]
            factor = factors[1] if factors[1] is not None or name == "div" else factors[0]
            if factor is not None and _parts(marks[0]) != _parts(marks[1]):
                scale = abs(1 / factor if name == "div" and factor else factor)
                # Times the replicas or the batch it is whole; times 0.1 it is a part of a sum of losses.
                return found if scale < 2 else MIRRORED
        return frozenset(ScaledPart(part) for part in found)


def _parts(mark: Mark) -> frozenset[Part]:
    return frozenset(word for word in mark if isinstance(word, Part))


def _spread(atom: Any, mark: Mark) -> Mark:
    number = _number(atom, mark)
    return MIRRORED if number is None else frozenset({_Constant(number)})


def _number(atom: Any, mark: Mark) -> float | None:
    """Returns the number that all elements are, where that is known."""
    if isinstance(atom, jex_core.Literal) and np.isrealobj(atom.val):
        return float(atom.val) if np.ndim(atom.val) == 0 else None
    if len(mark) == 1 and isinstance(word := next(iter(mark)), _Constant):
        return float(word)
    return None


def _has_parts(jaxpr: Any) -> bool:
    return any(eqn.primitive is part_of_mean_p for eqn in jaxpr.eqns) or any(
        map(_has_parts, jex_core.subjaxprs(jaxpr))
    )
