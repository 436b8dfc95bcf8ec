"""One element of a distributed dataset: its shares on the host, and its arrays on the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import (
    is_local,
    local_replicas,
    num_replicas,
    outside_mesh,
    split_sharding,
)
from distribute_jax._messages import PyTree, leaf_text, listed, path_text
from distribute_jax._padding import padded_rows
from distribute_jax._values import Layout, PerReplica
from distribute_jax.data._check import device_dtype, dtype_on_device
from distribute_jax.data._split import Division


@dataclass(frozen=True)
class EpochProgress:
    """How far an epoch has come, and what it takes for a full batch: all that resuming needs."""

    batches: int = 0
    """Batches taken from the source, those that were skipped included."""
    first: int = 0
    """Examples of the first batch that had any; 0 before it."""
    largest: int = 0
    """Examples of the largest batch."""

    def with_batch(self, n: int) -> EpochProgress:
        """Returns the progress after one more batch, of n examples."""
        return EpochProgress(self.batches + 1, self.first or n, max(self.largest, n))


@dataclass(frozen=True)
class HostElement:
    """A checked batch on the host, with the shares of its rows."""

    batch: PyTree
    """The user's structure, with host arrays: the rows of this process."""
    division: Division
    """Of these rows over the replicas of this process."""
    progress: EpochProgress
    """How far the epoch has come with this element."""
    all_counts: tuple[int, ...] | None = None
    """Real examples of each replica of all processes, where several agreed on some padding."""
    digest: str | None = None
    """Of the whole batch: in the first one of a pass that all processes read."""

    def placed(self, mesh: Mesh) -> PyTree:
        """Returns the same structure with a ``PerReplica`` of N × share rows for each leaf."""
        division, local = self.division, is_local(mesh)
        length = num_replicas(mesh) * division.share
        rows = None if division.counts is None else padded_rows(division.counts, division.share)

        def place(leaf: Any) -> PerReplica:
            if not local:
                array = _from_this_process(leaf, (length, *leaf.shape[1:]), rows, mesh)
            elif isinstance(leaf, jax.Array):
                array = _from_device(leaf, rows, mesh)
            else:
                array = _from_host(leaf, (length, *leaf.shape[1:]), rows, mesh)
            return PerReplica(array, mesh, layout=Layout.JOINED, counts=self.real_counts)

        return jax.tree.map(place, self.batch)

    @property
    def real_counts(self) -> tuple[int, ...] | None:
        """Real examples of each replica of all processes; None if no row of any is padding."""
        return self.division.counts if self.all_counts is None else self.all_counts

    @property
    def spec(self) -> PyTree:
        """One replica's share, padding included, as ``jax.ShapeDtypeStruct``s."""
        share = self.division.share
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((share, *leaf.shape[1:]), dtype_on_device(leaf)),
            self._prototype,
        )

    @property
    def _prototype(self) -> PyTree:
        return self.batch

    @property
    def examples(self) -> int | None:
        """The number of real examples, or None if no row is padding."""
        counts = self.division.counts
        return None if counts is None else sum(counts)

    def masked(self, replicas: int) -> HostElement:
        """Returns an element of the same shapes in which every row is padding."""
        return replace(self, division=Division(self.division.share, (0,) * replicas))

    def counts(self, replicas: int) -> tuple[int, ...]:
        """Returns the real examples of each replica of this process."""
        return self.division.counts or (self.division.share,) * replicas

    def with_share(
        self, share: int, counts: Sequence[int], all_counts: Sequence[int]
    ) -> HostElement:
        """Returns the element with the share, and the real examples, that all processes agreed on."""
        everywhere = Division.of(all_counts, share).counts
        return replace(self, division=Division.of(counts, share), all_counts=everywhere)


def _from_host(leaf: Any, shape: tuple[int, ...], rows: Any, mesh: Mesh) -> jax.Array:
    def shard(index: Any) -> np.ndarray[Any, Any]:
        return _copied(leaf[index[0]] if rows is None else leaf[rows[index[0]]])

    with np.errstate(over="ignore"):
        return jax.make_array_from_callback(shape, split_sharding(mesh), shard)


def _from_this_process(leaf: Any, shape: tuple[int, ...], rows: Any, mesh: Mesh) -> jax.Array:
    local = np.asarray(leaf)
    with np.errstate(over="ignore"):
        local = _copied(local if rows is None else local[rows])
    array: jax.Array = jax.make_array_from_process_local_data(split_sharding(mesh), local, shape)
    return array


def _copied(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # JAX may keep using the host memory, and loaders reuse their buffers.
    return np.array(rows, dtype=device_dtype(rows.dtype), order="C", subok=False)


def _from_device(leaf: jax.Array, rows: Any, mesh: Mesh) -> jax.Array:
    # Inside scope() the mesh context would refuse any computation on one device.
    with jax.set_mesh(None):
        array: jax.Array = jax.device_put(
            leaf if rows is None else leaf[rows], split_sharding(mesh)
        )
        return array


@dataclass(frozen=True)
class PartsElement(HostElement):
    """An element whose ``batch`` is a tuple: a checked batch, or None, for each replica."""

    def placed(self, mesh: Mesh) -> PyTree:
        share = self.division.share
        rows_of = list(self._rows())
        sharding, first = split_sharding(mesh), local_replicas(mesh).start

        def place(*leaves: Any) -> PerReplica:
            shape = (share * num_replicas(mesh), *leaves[0].shape[1:])
            shards = []
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                replica = ((index or (slice(0),))[0].start or 0) // share
                part, rows = rows_of[replica - first]
                shards.append(_on_device(leaves[part], rows, device))
            array = jax.make_array_from_single_device_arrays(shape, sharding, shards)
            return PerReplica(array, mesh, layout=Layout.JOINED, counts=self.real_counts)

        return jax.tree.map(place, *present(self.batch))

    @property
    def _prototype(self) -> PyTree:
        return present(self.batch)[0]

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Yields for each replica which of the present batches its rows come from, and which rows."""
        sizes = [0 if part is None else _length(part) for part in self.batch]
        nonempty = [size for part, size in zip(self.batch, sizes, strict=True) if part is not None]
        starts, ends = np.cumsum(nonempty) - nonempty, np.cumsum(nonempty)
        for rows in padded_rows(sizes, self.division.share).reshape(len(sizes), -1):
            part = int(np.searchsorted(ends, rows[0], side="right"))
            yield part, rows - starts[part]


def present(parts: Sequence[PyTree | None]) -> list[PyTree]:
    """Leaves out the replicas that have no batch."""
    return [part for part in parts if part is not None]


def check_parts_match(parts: Sequence[PyTree | None], where: str) -> None:
    """Raises if the replicas' batches differ in more than their number of examples."""
    trees = [jax.tree_util.tree_leaves_with_path(part) for part in present(parts)]
    lines = [
        f"{path_text(path, 'batch')}: {leaf_text(leaf)} and {leaf_text(other)}"
        for tree in trees[1:]
        for (path, leaf), (_, other) in zip(trees[0], tree, strict=True)
        if (leaf.shape[1:], dtype_on_device(leaf)) != (other.shape[1:], dtype_on_device(other))
    ]
    if lines:
        raise ArgumentError(
            f"{where} takes a batch for each replica, and these do not make one array:\n"
            f"{listed(lines)}\nOnly dim 0, the number of examples, may differ between replicas. Pad "
            "the other dims to one size, and give each leaf one dtype."
        )


def _length(part: PyTree) -> int:
    return int(jax.tree.leaves(part)[0].shape[0])


def _on_device(leaf: Any, rows: Any, device: jax.Device) -> Any:
    # Inside scope() the mesh context would refuse any computation on one device.
    with outside_mesh(), np.errstate(over="ignore"):
        if len(rows) != len(leaf) or rows[0] != 0:
            leaf = leaf[rows]
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf, dtype=device_dtype(leaf.dtype), order="C")
        return jax.device_put(leaf, device)
