"""Where an epoch ends, when several processes must agree on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from distribute_jax.data._element import HostElement


class EndOfData(Protocol):
    """An agreement between processes on how many steps an epoch has.

    All processes run the same compiled steps together, so a process whose data has ended goes on
    with elements of padding alone until the data of every process has ended.
    """

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        """Gives the elements of one process for each step that the processes take together.

        Args:
            elements: this process's own.
            length: how many they are, or None where that is not known before the end.

        Returns:
            The same elements, and then ``last.masked(replicas)`` for each step for which only other
            processes have data.
        """


class OneProcess:
    """One process agrees with itself: the epoch ends with its own elements."""

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        """See ``EndOfData.steps``."""
        del length
        return elements
