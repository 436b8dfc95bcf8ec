"""One element of a distributed dataset: its shares on the host, and its arrays on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._mesh import (
    is_local,
    local_replicas,
    num_replicas,
    outside_mesh,
    split_sharding,
)
from distribute_jax._messages import PyTree
from distribute_jax._padding import padded_rows
from distribute_jax._values import Layout, PerReplica
from distribute_jax.data._check import device_dtype, dtype_on_device
from distribute_jax.data._split import EpochProgress


@dataclass(frozen=True)
class HostElement:
    """A checked batch on the host, and how its rows are divided over the replicas of this process."""

    batch: PyTree
    """The user's structure, with the rows of this process."""
    share: int
    """Rows of each replica, padding included."""
    counts: Sequence[int]
    """Real examples of each replica of this process."""
    progress: EpochProgress
    """How far the epoch has come with this element."""
    all_counts: Sequence[int] | None = None
    """Real examples of each replica of all processes, if there are others."""
    digest: str | None = None
    """Of the whole batch: in the first one of a pass that all processes read."""

    def placed(self, mesh: Mesh) -> PyTree:
        """Returns the same structure with a ``PerReplica`` of N × share rows for each leaf."""
        share = self.share
        rows = None if set(self.counts) == {share} else padded_rows(self.counts, share)
        everyone = self.all_counts or self.counts
        counts = None if set(everyone) == {share} else tuple(everyone)
        sharding, first = split_sharding(mesh), local_replicas(mesh).start * share
        size = num_replicas(mesh) * share

        def from_host(leaf: Any) -> jax.Array:
            def shard(index: Any) -> np.ndarray[Any, Any]:
                start, stop, _ = index[0].indices(size)
                places = slice(start - first, stop - first)
                values = leaf[places if rows is None else rows[places]]
                # JAX may keep using the host memory, and loaders reuse their buffers.
                return np.array(values, dtype=device_dtype(values.dtype), order="C", subok=False)

            shape = (size, *leaf.shape[1:])
            return jax.make_array_from_callback(shape, sharding, shard)

        def place(leaf: Any) -> PerReplica:
            if isinstance(leaf, jax.Array) and is_local(mesh):
                array = jax.device_put(leaf if rows is None else leaf[rows], sharding)
            else:
                array = from_host(np.asanyarray(leaf))
            return PerReplica(array, mesh, layout=Layout.JOINED, counts=counts)

        # Inside scope() the mesh context would refuse any computation on one device.
        with outside_mesh(), np.errstate(over="ignore"):
            return jax.tree.map(place, self.batch)

    @property
    def spec(self) -> PyTree:
        """One replica's share, padding included, as ``jax.ShapeDtypeStruct``s."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.share, *leaf.shape[1:]), dtype_on_device(leaf)),
            self.batch,
        )
