"""One element of a distributed dataset while it is still on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import Mesh

from distribute_jax._typing import PyTree
from distribute_jax.data._assemble import assemble, spec
from distribute_jax.data._seen import Seen
from distribute_jax.data._split import Division


@dataclass(frozen=True)
class HostElement:
    """A checked global batch with the shares of its rows."""

    batch: PyTree
    """The user's structure, with host arrays (global view)."""
    division: Division
    """Which replica gets how many of its rows."""
    seen: Seen
    """How far the epoch has come with this element."""

    def placed(self, mesh: Mesh) -> PyTree:
        """Puts it on the devices: the same structure with ``PerReplica``s."""
        return assemble(self.batch, self.division, mesh)

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
