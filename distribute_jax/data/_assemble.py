"""From a batch on the host to a tree of per-replica arrays on the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._mesh import is_local, num_replicas, split_sharding
from distribute_jax._padding import padded_rows
from distribute_jax._typing import PyTree
from distribute_jax._values import Layout, PerReplica
from distribute_jax.data._check import device_dtype
from distribute_jax.data._split import Division


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
