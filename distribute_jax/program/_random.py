"""Random streams inside ``run``: other numbers on each replica, the same stored state on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import DATA

SAME_ON_ALL = ("params",)
"""Streams that draw the same numbers on every replica, because they make weights."""


def per_replica_keys(variables: Sequence[nnx.Variable[Any]], replicas: int) -> list[Any]:
    """Folds the replica id into the key of each stream, for the time of the trace.

    Replica 0 keeps the stream as it is, so that one replica draws what undistributed code draws.

    Returns:
        The raw values that the step starts from; a variable still holding its own is unchanged.
    """
    if replicas > 1:
        streams = [v for v in variables if isinstance(v, nnx.RngKey) and v.tag not in SAME_ON_ALL]
        write_raw(streams, [_own_key(raw) for raw in read_raw(streams)])
    return read_raw(variables)


def _own_key(key: jax.Array) -> jax.Array:
    replica = jax.lax.axis_index(DATA)

    def fold(one: jax.Array) -> jax.Array:
        return jnp.where(replica == 0, one, jax.random.fold_in(one, replica))

    for _ in range(key.ndim):
        fold = jax.vmap(fold)
    return fold(key)
