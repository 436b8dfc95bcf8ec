"""One element of a distributed dataset: its rows on the host, and its transfer to the devices."""

from __future__ import annotations

import operator
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
from distribute_jax._messages import PyTree, flatten, is_key
from distribute_jax._padding import padded_rows
from distribute_jax._values import Layout, PerReplica
from distribute_jax.data._check import device_dtype, dtype_on_device
from distribute_jax.data._split import EpochProgress


@dataclass(slots=True, eq=False)
class HostElement:
    """A checked batch on the host, and how its rows are divided over the replicas of this process."""

    batch: PyTree
    """The user's structure, with the rows of this process."""
    share: int
    """Rows of each replica, padding included."""
    counts: Sequence[int]
    """Real examples of each replica of this process."""
    progress: EpochProgress
    """Of the epoch, this element included."""
    all_counts: Sequence[int] | None = None
    """Real examples of each replica of all processes, if there are several."""
    digest: str | None = None
    """Of the whole batch, in the first element of a pass in which all processes read the same."""

    def placed(self, mesh: Mesh) -> PyTree:
        """Returns the same structure with a ``PerReplica`` of N × share rows for each leaf."""
        share = self.share
        rows = None if set(self.counts) == {share} else padded_rows(self.counts, share)
        all_counts = self.all_counts or self.counts
        counts = None if set(all_counts) == {share} else tuple(all_counts)
        leaves, treedef = flatten(self.batch, None)
        if _stays_on_host(leaves, mesh):
            arrays: list[Any] = [_copied_rows(leaf, rows) for leaf in leaves]
        else:
            # Inside scope() the mesh context would refuse any computation on one device.
            with outside_mesh():
                arrays = [_transferred(leaf, rows, share, mesh) for leaf in leaves]
        values = [PerReplica(a, mesh, layout=Layout.JOINED, counts=counts) for a in arrays]
        return treedef.unflatten(values)

    @property
    def spec(self) -> PyTree:
        """One replica's share, padding included, as ``jax.ShapeDtypeStruct``s."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.share, *leaf.shape[1:]), dtype_on_device(leaf)),
            self.batch,
        )


_MAX_CALL_BOUND_BYTES = 1 << 20
"""Bytes of a batch up to which calls of ``device_put`` take longer than the copying."""


def _stays_on_host(leaves: list[Any], mesh: Mesh) -> bool:
    """True if the step that takes a batch transfers it fastest: two small arrays in 12 µs, not in 155."""
    return (
        mesh.size == 1
        and is_local(mesh)
        and {np.ndarray}.issuperset(map(type, leaves))
        and sum(map(_read_nbytes, leaves)) < _MAX_CALL_BOUND_BYTES
    )


_read_nbytes = operator.attrgetter("nbytes")


def _transferred(leaf: Any, rows: Any, share: int, mesh: Mesh) -> jax.Array:
    """Returns an array of N × share rows, of which this process transfers those of its replicas."""
    sharding, first = split_sharding(mesh), local_replicas(mesh).start * share
    if isinstance(leaf, jax.Array) and is_local(mesh):
        return jax.device_put(leaf if rows is None else taken(leaf, rows), sharding)
    if is_key(leaf):
        bits = _transferred(jax.random.key_data(leaf), rows, share, mesh)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    leaf, size = np.asanyarray(leaf), num_replicas(mesh) * share

    def shard(index: Any) -> np.ndarray[Any, Any]:
        start, stop, _ = index[0].indices(size)
        local = slice(start - first, stop - first)
        return _copied_rows(leaf, local if rows is None else rows[local])

    return jax.make_array_from_callback((size, *leaf.shape[1:]), sharding, shard)


def taken(leaf: Any, rows: Any) -> Any:
    """Returns rows of an array; from the host if it is sharded, since JAX cannot index explicit axes."""
    is_sharded = isinstance(leaf, jax.Array) and len(leaf.devices()) > 1
    return (np.asarray(leaf) if is_sharded and not is_key(leaf) else leaf)[rows]


def _copied_rows(leaf: np.ndarray[Any, Any], rows: Any) -> np.ndarray[Any, Any]:
    # A copy: JAX may continue to read host memory, and loaders reuse their buffers.
    values = leaf if rows is None else leaf[rows]
    if (dtype := device_dtype(values.dtype)) == values.dtype:
        return np.array(values, order="C", subok=False)
    with np.errstate(over="ignore"):  # a float of 64 bits may become infinite
        return np.array(values, dtype=dtype, order="C", subok=False)
