"""One element of a distributed dataset while it is still on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from distribute_jax._typing import PyTree
from distribute_jax.data._assemble import assemble, spec
from distribute_jax.data._seen import Seen
from distribute_jax.data._split import Division, laid_over


@dataclass(frozen=True)
class HostElement:
    """A checked global batch with the shares of its rows."""

    batch: PyTree
    """The user's structure, with host arrays (global view)."""
    division: Division
    """Which replica gets how many of its rows."""
    seen: Seen
    """How far the epoch has come with this element."""
    all_counts: tuple[int, ...] | None = None
    """Real examples of each replica of all processes, where several agreed on some padding."""

    whole: str | None = None
    """A digest of the whole batch: of the first one of a pass that all processes read."""

    def placed(self, mesh: Mesh) -> PyTree:
        """Puts it on the devices: the same structure with ``PerReplica``s."""
        return assemble(self.batch, self.division, mesh, self.real_counts)

    @property
    def real_counts(self) -> tuple[int, ...] | None:
        """Real examples of each replica of all processes; None where no row of any is padding."""
        return self.division.counts if self.all_counts is None else self.all_counts

    @property
    def spec(self) -> PyTree:
        """One replica's share, padding included, as ``jax.ShapeDtypeStruct``s."""
        return spec(self.batch, self.division)

    @property
    def examples(self) -> int | None:
        """The number of its examples, or None where no row is padding."""
        counts = self.division.counts
        return None if counts is None else sum(counts)

    def masked(self, replicas: int) -> HostElement:
        """Gives an element of the same shapes in which every row is padding."""
        return replace(self, division=Division(self.division.share, (0,) * replicas))

    def counts(self, replicas: int) -> tuple[int, ...]:
        """Gives the real examples of each replica of this process."""
        return self.division.counts or (self.division.share,) * replicas

    def agreed(self, share: int, mine: Sequence[int], everyone: Sequence[int]) -> HostElement:
        """Gives the element with the share of all processes, and the real examples of each replica."""
        is_full = all(count == share for count in everyone)
        division = laid_over(mine, share)
        return replace(self, division=division, all_counts=None if is_full else tuple(everyone))
