"""Per-replica values from a function of the replica."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError, UnsupportedError
from distribute_jax._fitting import fitting
from distribute_jax._mesh import (
    is_local,
    local_replicas,
    num_replicas,
    outside_mesh,
    split_sharding,
)
from distribute_jax._tree import is_key, leaf_text
from distribute_jax._values import PerReplica, UnevenPerReplica
from distribute_jax.processes import job


def values_of_replicas(value_fn: Callable[[Any], Any], context: Any, mesh: Mesh) -> Any:
    """Calls a function for each replica of this process, and makes its nests one of per-replica values.

    Args:
        value_fn: gives a nest of arrays or numbers.
        context: makes what the function is told from a replica and the number of all.
        mesh: the replicas.
    """
    method = "experimental_distribute_values_from_function"
    if not callable(value_fn):
        raise ArgumentError(
            f"strategy.{method} got {leaf_text(value_fn)}, which is no function. Pass one that takes a "
            "ValueContext: lambda context: context.replica_id_in_sync_group."
        )
    count = num_replicas(mesh)
    nests = [value_fn(context(i, count)) for i in local_replicas(mesh)]
    for leaf in jax.tree.leaves(nests):
        # An int that is too large for NumPy is told apart from objects below.
        if not is_key(leaf) and not isinstance(leaf, int) and np.asarray(leaf).dtype.kind in "OSU":
            raise ArgumentError(
                f"strategy.{method}: the function gave {leaf_text(leaf)}, which is neither array nor number, "
                "so no device can hold it. Give each replica an index, and look the object up outside."
            )
    if len({str(jax.tree.structure(nest)) for nest in nests}) > 1:
        raise ArgumentError(
            f"strategy.{method}: the function gave the replicas nests of different structure, "
            f"{jax.tree.structure(nests[0])} and others. Give all the same keys and lengths."
        )
    if count == 1:
        return jax.tree.map(
            lambda part: jnp.asarray(fitting(part, "A per-replica value")), nests[0]
        )
    return jax.tree.map(lambda *parts: stacked_value(parts, mesh), *nests)


def stacked_value(parts: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Makes a per-replica value from one host value for each replica."""
    if all(map(is_key, parts)):
        bits = stacked_value([jax.random.key_data(part) for part in parts], mesh)
        keys = jax.random.wrap_key_data(bits.global_array, impl=jax.random.key_impl(parts[0]))
        return PerReplica(keys, mesh)
    arrays = [fitting(np.asarray(part), "A per-replica value") for part in parts]
    if _are_alike(arrays, mesh):
        # int64 and float64 become what JAX holds, as everywhere.
        dtype = jax.dtypes.canonicalize_dtype(arrays[0].dtype)
        stacked = np.stack(arrays).astype(dtype)
        return PerReplica(_stacked_over(stacked, mesh), mesh)
    with outside_mesh():
        return UnevenPerReplica([jnp.asarray(array) for array in arrays], mesh)


def _are_alike(arrays: Sequence[np.ndarray[Any, Any]], mesh: Mesh) -> bool:
    """Tells whether the values of all replicas have one shape and dtype."""
    own = [leaf_text(array) for array in arrays]
    found = job()
    if found is None or is_local(mesh):
        return len(set(own)) == 1
    told = found.exchange("the shapes of values", json.dumps(own))
    shapes = [shape for some in told for shape in json.loads(some)]
    if len(set(shapes)) > 1:
        raise UnsupportedError(
            f"The function gave the replicas values of different shapes, {', '.join(shapes[:8])}. In a job "
            "of several processes they have one shape and dtype: fill them up to the largest, and give their "
            "real sizes as a second value."
        )
    return True


def _stacked_over(parts: np.ndarray[Any, Any], mesh: Mesh) -> jax.Array:
    """Makes the array of all replicas from the stacked values of this process's own."""
    shape = (num_replicas(mesh), *parts.shape[1:])
    to = split_sharding(mesh)
    array: jax.Array = (
        jax.device_put(parts, to)
        if is_local(mesh)
        else jax.make_array_from_process_local_data(to, parts, shape)
    )
    return array
