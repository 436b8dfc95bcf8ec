"""Likely mistakes in a traced step: unsummed parts of a mean, reductions and draws of equal values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax.collectives._markers import part_of_mean_p
from distribute_jax.program._replication import Walk
from distribute_jax.program._replication_rules import (
    MIRRORED,
    RULES,
    Control,
    Mark,
    Outcome,
    line,
    union,
    user_line,
)

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


STREAM: Mark = frozenset({"a random stream"})
"""The mark of random streams, and of all that is computed from them."""


def equal_reductions(
    jaxpr: Any, in_marks: Sequence[Mark], *, axis: str = "data", axis_size: int
) -> list[str] | None:
    """Returns the lines of collectives, or None where one gets something else on each replica.

    What is random on each replica, as by dropout, counts as equal: the examples are.

    Args:
        jaxpr: the program of one replica, with ``axis`` bound.
        in_marks: as for ``prove``, but ``STREAM`` for random streams.
        axis: the mesh axis of the replicas.
        axis_size: the number of replicas.
    """
    walk = _ReducingWalk(axis, axis_size)
    walk.run(jaxpr, in_marks, Control())
    if any(mark and mark != STREAM for _, mark in walk.met.values()):
        return None
    return sorted({line(eqn) for eqn, _ in walk.met.values()})


class _ReducingWalk(Walk):
    """The pass of the proof, which also keeps what goes into each collective."""

    def __init__(self, axis: str, axis_size: int) -> None:
        super().__init__(axis, axis_size)
        self.met: dict[int, tuple[Any, Mark]] = {}
        self._operands = MIRRORED

    def apply(self, eqn: Any, marks: list[Mark], control: Control) -> Outcome:
        """Keeps the mark of streams on all that they go into, as on keys with the replica id."""
        marks = [STREAM if mark >= STREAM else mark for mark in marks]
        self._operands = union(marks)
        outcome = super().apply(eqn, marks, control)
        return Outcome(
            [STREAM if mark >= STREAM else mark for mark in outcome.outs], outcome.writes
        )

    def meet(self, eqn: Any, control: Control) -> None:
        """Notes the collective, with all that it ever gets: loops are walked again."""
        _, before = self.met.get(id(eqn), (eqn, MIRRORED))
        self.met[id(eqn)] = eqn, union([before, self._operands])


_DRAWING = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})


class EqualDraws(NamedTuple):
    """Lines in the user's code, in order."""

    seeds: list[str]
    """That seed a key with which every replica then draws the same numbers."""
    rows: list[str]
    """That draw a number for each row of the batch with a key from outside, the same on all replicas."""


def equal_draws(
    jaxpr: Any, in_marks: Sequence[Mark], *, rows: int = 0, axis: str = "data", axis_size: int
) -> EqualDraws:
    """Finds the lines that draw the same numbers on every replica.

    A key that the replica id or another per-replica value went into draws other numbers on each replica.

    Args:
        jaxpr: the program of one replica, with ``axis`` bound.
        in_marks: as for ``prove``; random streams, which are to draw what they draw, marked as well.
        rows: the rows of a replica's share of the batch; 0 where there is none.
        axis: the mesh axis of the replicas.
        axis_size: the number of replicas.
    """
    if not _meets(jaxpr.jaxpr, {"random_seed", *(_DRAWING if rows > 1 else ())}):
        return EqualDraws([], [])
    walk = _SeedWalk(axis, axis_size, rows)
    walk.run(jaxpr, in_marks, Control())
    return EqualDraws(sorted(walk.seeds), sorted(walk.draws))


class _Seed(str):
    """The mark of what was made from a seed and nothing that differs: the line of the seed."""

    __slots__ = ()


class _SeedWalk(Walk):
    """The pass of the proof, with one more kind of mark."""

    def __init__(self, axis: str, axis_size: int, rows: int) -> None:
        super().__init__(axis, axis_size)
        self.rows = rows
        self.seeds: set[str] = set()
        self.draws: set[str] = set()
        self._around: list[Any] = []

    def apply(self, eqn: Any, marks: list[Mark], control: Control) -> Outcome:
        """Marks seeds, and notes draws in which nothing went that differs."""
        mark = union(marks)
        self._around.append(eqn)
        try:
            return self._noted(eqn, marks, mark, control)
        finally:
            self._around.pop()

    def _noted(self, eqn: Any, marks: list[Mark], mark: Mark, control: Control) -> Outcome:
        if eqn.primitive.name == "random_seed" and not mark:
            return Outcome([frozenset({_Seed(self._line())})])
        if eqn.primitive.name in _DRAWING:
            if mark and all(isinstance(word, _Seed) for word in mark):
                self.seeds |= mark
            if not mark and self.rows > 1 and _rows(eqn) == self.rows:
                self.draws.add(self._line())
        return super().apply(eqn, marks, control)

    def _line(self) -> str:
        """Returns the user's line: that of the call where JAX has traced the function."""
        known = (user_line(eqn) for eqn in reversed(self._around))
        return next(filter(None, known), "an unknown line")

    def meet(self, eqn: Any, control: Control) -> None:
        """Lets every collective be: whether it may hang was proved without the seeds."""


def _rows(eqn: Any) -> int:
    """Returns the length of dim 0 of what is drawn, which rng_bit_generator returns after the key."""
    shape = eqn.outvars[-1].aval.shape
    return int(shape[0]) if shape else 0


def _meets(jaxpr: Any, names: set[str]) -> bool:
    return any(eqn.primitive.name in names for eqn in jaxpr.eqns) or any(
        _meets(inner, names) for inner in jex_core.subjaxprs(jaxpr)
    )
