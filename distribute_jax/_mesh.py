"""The mesh of a strategy: replicas along ``"data"``, and the shardings made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

DATA = "data"
"""The mesh axis along which the replicas lie."""


def replica_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Lays one replica on each device, in the order given."""
    # Newer JAX makes axes Explicit by default, where shard_map refuses other shardings than its own.
    return Mesh(np.asarray(devices, dtype=object), (DATA,), axis_types=(AxisType.Auto,))


def num_replicas(mesh: Mesh) -> int:
    """Gives the number of replicas on a mesh."""
    return int(mesh.shape[DATA])


def inside_replica(mesh: Mesh) -> AbstractMesh:
    """Gives the mesh as code inside ``run`` sees it: ``"data"`` is bound, other axes are automatic."""
    kinds = tuple(AxisType.Manual if name == DATA else AxisType.Auto for name in mesh.axis_names)
    inside: AbstractMesh = mesh.abstract_mesh.update(axis_types=kinds)
    return inside


def mirrored_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every replica holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def split_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose dim 0 is divided among the replicas."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def outside_mesh() -> Any:
    """Leaves the mesh context for a ``with`` block, where computing on one shard is allowed."""
    return jax.set_mesh(cast("Any", None))
