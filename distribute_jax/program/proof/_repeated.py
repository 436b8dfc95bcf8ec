"""Collectives of a step in which every replica has the same, since no argument is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distribute_jax.program.proof._marks import MIRRORED, Control, Mark, line, union
from distribute_jax.program.proof._prove import Walk
from distribute_jax.program.proof._rules import Outcome

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
        axis: the mesh axis along which the replicas lie.
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
