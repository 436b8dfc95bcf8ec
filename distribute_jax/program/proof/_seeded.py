"""Random numbers that every replica of a step draws alike: with keys that it seeds, or gets from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core

from distribute_jax.program.proof._marks import Control, Mark, union, user_line
from distribute_jax.program.proof._prove import Walk
from distribute_jax.program.proof._rules import Outcome

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
        axis: the mesh axis along which the replicas lie.
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
