"""From a batch on the host to a tree of per-replica arrays on the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._mesh import num_replicas, split_sharding
from distribute_jax._padding import padded_rows
from distribute_jax._typing import PyTree
from distribute_jax._values import Layout, PerReplica
from distribute_jax.data._check import device_dtype
from distribute_jax.data._split import Division


def assemble(batch: PyTree, division: Division, mesh: Mesh) -> PyTree:
    """Puts a checked global batch on the devices, each shard straight from the host.

    Args:
        batch: a tree of arrays (global view) that ``check_batch`` passed.
        division: the shares of its rows.
        mesh: the strategy's mesh.

    Returns:
        The same tree of joined ``PerReplica``s; each global array has N × share rows.
    """
    replicas = num_replicas(mesh)
    rows = None if division.counts is None else padded_rows(division.counts, division.share)

    def place(leaf: Any) -> PerReplica:
        if isinstance(leaf, jax.Array):
            array = _from_device(leaf, rows, mesh)
        else:
            array = _from_host(leaf, (replicas * division.share, *leaf.shape[1:]), rows, mesh)
        return PerReplica(array, mesh, layout=Layout.JOINED, counts=division.counts)

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
        with np.errstate(over="ignore"):
            return np.array(mine, dtype=dtype, order="C", subok=False)

    return jax.make_array_from_callback(shape, split_sharding(mesh), shard)


def _from_device(leaf: jax.Array, rows: Any, mesh: Mesh) -> jax.Array:
    # Inside scope() the mesh context would refuse any computation on one device.
    with jax.set_mesh(None):
        whole = leaf if rows is None else leaf[rows]
        placed: jax.Array = jax.device_put(whole, split_sharding(mesh))
        return placed
