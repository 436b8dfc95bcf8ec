"""A variable of replicas, the numbers of pytrees, and comparisons of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distribute_jax as dj


def sum_on_read(value: Any = 0.0) -> dj.Variable:
    """A variable whose value is the sum of what the replicas hold."""
    synchronization, aggregation = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.SUM
    return dj.Variable(value, synchronization=synchronization, aggregation=aggregation)


def replica_number() -> jax.Array:
    """The id of this replica as a float."""
    return dj.get_replica_context().replica_id_in_sync_group.astype(jnp.float32)


def on_host(x: Any) -> np.ndarray:
    """An array on the host; random keys as their numbers."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def numbers(tree: Any) -> list[np.ndarray]:
    """All leaves on the host."""
    return [on_host(x) for x in jax.tree.leaves(tree)]


def assert_same_bits(one: Any, other: Any) -> None:
    """Asserts that two pytrees have the same numbers."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    for (path, x), y in pairs:
        np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))


def assert_close_to_largest(one: Any, other: Any, rtol: float = 2e-5, least: float = 1e-30) -> None:
    """Compares two pytrees, relative to the largest value of each leaf."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    for (path, x), y in pairs:
        scale = max(np.abs(x).max(initial=0.0), least)
        assert np.abs(x - y).max(initial=0.0) <= rtol * scale, jax.tree_util.keystr(path)


def assert_close(one: Any, other: Any, rtol: float = 1e-7, atol: float = 0.0) -> None:
    """Asserts that two pytrees have nearly the same numbers."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol)
