"""Which row comes when: a pure function of the seed and the place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

ENDLESS = 2**62
"""Places in an epoch that has no end: more than anyone visits, and still an index."""


def passes_without_end(length: int) -> int:
    """Gives how often something is passed over in an epoch that has no end."""
    return -(-ENDLESS // length)


@dataclass(frozen=True)
class Order:
    """The rows of arrays in the order of an epoch, each pass over them shuffled anew."""

    rows: int
    """How many there are; at least one."""
    seed: int | None = None
    """None: as they stand."""
    passes: int = 1
    """Passes over the rows in one epoch."""
    _latest: dict[int, NDArray[Any]] = field(default_factory=dict, compare=False, repr=False)
    """The order of the pass that was asked for last, by its number."""

    @property
    def length(self) -> int:
        """Places in one epoch."""
        return self.rows * self.passes

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.length >= ENDLESS

    def shuffled(self, seed: int) -> Order:
        """The same rows in the order that a seed gives."""
        return replace(self, seed=seed, _latest={})

    def repeated(self, times: int | None) -> Order:
        """As many passes for each one now; None: without end."""
        passes = passes_without_end(self.rows) if times is None else self.passes * times
        return replace(self, passes=passes)

    def take(self, start: int, stop: int) -> slice | NDArray[Any]:
        """Gives the rows at places start … stop - 1, counted on through all epochs.

        A slice where the rows stand in one run, so that taking them copies nothing.
        """
        first, last = start // self.rows, (stop - 1) // self.rows
        if first == last and self.seed is None:
            return slice(start - first * self.rows, stop - first * self.rows)
        parts = []
        for number in range(first, last + 1):
            begin = number * self.rows
            parts.append(self._one_pass(number)[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)

    def _one_pass(self, number: int) -> NDArray[Any]:
        if self.seed is None:
            return np.arange(self.rows)
        known = self._latest.get(number)
        if known is None:
            known = _permutation(self.rows, self.seed, number)
            self._latest.clear()
            self._latest[number] = known
        return known


def _permutation(rows: int, seed: int, number: int) -> NDArray[Any]:
    # Not Generator.permutation: of NumPy's random numbers only the raw ones are promised to stay the
    # same in later versions, and a run may be resumed under another one.
    raw = np.random.Philox(key=np.array([seed, number], np.uint64)).random_raw(rows)
    return np.argsort(raw, kind="stable")
