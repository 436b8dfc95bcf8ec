"""What an epoch has shown so far of its source."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Seen:
    """How far an epoch has come, and what it takes for a full batch: all that going on needs."""

    batches: int = 0
    """Batches taken from the source, those that were skipped included."""
    first: int = 0
    """Examples of the first batch that had any; 0 before it."""
    largest: int = 0
    """Examples of the largest batch."""

    def with_batch(self, n: int) -> Seen:
        """Counts one more batch, of n examples."""
        return replace(
            self,
            batches=self.batches + 1,
            first=self.first or n,
            largest=max(self.largest, n),
        )
