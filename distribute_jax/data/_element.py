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
from distribute_jax.data._check import device_dtype
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


def assemble(
    batch: PyTree, division: Division, mesh: Mesh, counts: tuple[int, ...] | None
) -> PyTree:
    """Puts the rows of a checked batch on the devices, each shard straight from the host.

    Args:
        batch: a tree of arrays that ``check_batch`` passed, with the rows of this process.
        division: their shares over this process's replicas.
        mesh: the strategy's mesh.
        counts: real examples of each replica of all processes; None where no row is padding.

    Returns:
        The same tree of joined ``PerReplica``s; each global array has N × share rows.
    """
    length = num_replicas(mesh) * division.share
    rows = None if division.counts is None else padded_rows(division.counts, division.share)
    alone = is_local(mesh)

    def place(leaf: Any) -> PerReplica:
        if not alone:
            array = _from_this_process(leaf, (length, *leaf.shape[1:]), rows, mesh)
        elif isinstance(leaf, jax.Array):
            array = _from_device(leaf, rows, mesh)
        else:
            array = _from_host(leaf, (length, *leaf.shape[1:]), rows, mesh)
        return PerReplica(array, mesh, layout=Layout.JOINED, counts=counts)

    return jax.tree.map(place, batch)


def spec(batch: PyTree, division: Division) -> PyTree:
    """Describes one replica's share of a checked batch, padding included, without moving it."""

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else device_dtype(leaf.dtype)
        shape = (division.share, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree.map(describe, batch)


def _from_host(leaf: Any, shape: tuple[int, ...], rows: Any, mesh: Mesh) -> jax.Array:
    dtype = device_dtype(leaf.dtype)

    def shard(index: Any) -> np.ndarray[Any, Any]:
        mine = leaf[index[0]] if rows is None else leaf[rows[index[0]]]
        # A copy, because JAX may keep the host memory as its own, and loaders reuse their buffers.
        return np.array(mine, dtype=dtype, order="C", subok=False)

    with np.errstate(over="ignore"):
        return jax.make_array_from_callback(shape, split_sharding(mesh), shard)


def _from_this_process(leaf: Any, shape: tuple[int, ...], rows: Any, mesh: Mesh) -> jax.Array:
    mine = np.asarray(leaf)
    with np.errstate(over="ignore"):
        # A copy, because JAX may keep the host memory as its own, and loaders reuse their buffers.
        mine = np.array(
            mine if rows is None else mine[rows], dtype=device_dtype(leaf.dtype), order="C"
        )
    array: jax.Array = jax.make_array_from_process_local_data(split_sharding(mesh), mine, shape)
    return array


def _from_device(leaf: jax.Array, rows: Any, mesh: Mesh) -> jax.Array:
    # Inside scope() the mesh context would refuse any computation on one device.
    with jax.set_mesh(None):
        whole = leaf if rows is None else leaf[rows]
        placed: jax.Array = jax.device_put(whole, split_sharding(mesh))
        return placed


@dataclass(frozen=True)
class PartsElement(HostElement):
    """One checked batch for each replica as ``batch``, a tuple; None for a replica without one."""

    def placed(self, mesh: Mesh) -> PyTree:
        """See ``HostElement.placed``."""
        share = self.division.share
        taken = list(self._rows())
        sharding, first = split_sharding(mesh), local_replicas(mesh).start

        def place(*leaves: Any) -> PerReplica:
            shape = (share * num_replicas(mesh), *leaves[0].shape[1:])
            shards = []
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                replica = ((index or (slice(0),))[0].start or 0) // share
                owner, rows = taken[replica - first]
                shards.append(_on_device(leaves[owner], rows, device))
            whole = jax.make_array_from_single_device_arrays(shape, sharding, shards)
            return PerReplica(whole, mesh, layout=Layout.JOINED, counts=self.real_counts)

        return jax.tree.map(place, *present(self.batch))

    @property
    def spec(self) -> PyTree:
        """See ``HostElement.spec``."""
        return spec(present(self.batch)[0], self.division)

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Says for each replica which of the batches present its rows come from, and which rows."""
        sizes = [0 if part is None else _length(part) for part in self.batch]
        there = [size for part, size in zip(self.batch, sizes, strict=True) if part is not None]
        starts, ends = np.cumsum(there) - there, np.cumsum(there)
        for rows in padded_rows(sizes, self.division.share).reshape(len(sizes), -1):
            owner = int(np.searchsorted(ends, rows[0], side="right"))
            yield owner, rows - starts[owner]


def present(parts: Sequence[PyTree | None]) -> list[PyTree]:
    """Leaves out the replicas that have no batch."""
    return [part for part in parts if part is not None]


def check_alike(parts: Sequence[PyTree | None], where: str) -> None:
    """Raises where the replicas' batches differ in more than their number of examples."""
    trees = [jax.tree_util.tree_leaves_with_path(part) for part in present(parts)]
    lines = [
        f"{path_text(path, 'batch')}: {leaf_text(leaf)} and {leaf_text(other)}"
        for tree in trees[1:]
        for (path, leaf), (_, other) in zip(trees[0], tree, strict=True)
        if _kind(leaf) != _kind(other)
    ]
    if lines:
        raise ArgumentError(
            f"{where} takes a batch for each replica, and these do not make one array:\n"
            f"{listed(lines)}\nOnly dim 0, the number of examples, may differ between replicas. Pad "
            "the other dims to one size, and give each leaf one dtype."
        )


def _length(part: PyTree) -> int:
    return int(jax.tree.leaves(part)[0].shape[0])


def _kind(leaf: Any) -> tuple[Any, Any]:
    return leaf.shape[1:], leaf.dtype if isinstance(leaf, jax.Array) else device_dtype(leaf.dtype)


def _on_device(leaf: Any, rows: Any, device: jax.Device) -> Any:
    mine = leaf
    # Inside scope() the mesh context would refuse any computation on one device.
    with outside_mesh(), np.errstate(over="ignore"):
        if len(rows) != len(leaf) or rows[0] != 0:
            mine = leaf[rows]
        if not isinstance(mine, jax.Array):
            mine = np.asarray(mine, dtype=device_dtype(leaf.dtype), order="C")
        return jax.device_put(mine, device)


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
