"""The ring: each replica sends to the next one only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from distribute_jax.collectives._cross_device import CrossDeviceOps, checked_num_packs
from distribute_jax.collectives._dtypes import wide
from distribute_jax.collectives._mirrored import assume_mirrored


class RingAllReduce(CrossDeviceOps):
    """All-reduce written out with ``ppermute``, to read and to measure others by.

    The array is cut into one chunk for each of the N replicas. In N-1 steps every chunk travels once
    around the ring, and each replica adds its own values to it; in N-1 more the finished chunks travel
    around. Each replica sends 2 (N-1) / N of the array's bytes, however many there are.

    bfloat16 and float16 are added up in float32 and rounded once. Each chunk is finished by one
    replica and copied, so all replicas hold the same bits.

    Args:
        num_packs: the number of vectors that the arrays of each dtype are joined and cut into; with 0
            each array has its own ring.

    Raises:
        ValueError: ``num_packs`` is no int of 0 or more.

    Example:
        >>> import distribute_jax as dj
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=dj.RingAllReduce())
        >>> float(strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 3.0)))
        6.0

    References:
        Pitch Patarasuk and Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009, https://doi.org/10.1016/j.jpdc.2008.09.002
    """

    __module__ = "distribute_jax"

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = checked_num_packs(num_packs, "RingAllReduce")

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        """See the base class."""
        replicas = jax.lax.axis_size(axis_name)
        padded = jnp.pad(value.ravel(), (0, -value.size % replicas))
        finished = _reduce_scatter(padded.reshape(replicas, -1), axis_name)
        chunks = _all_gather(finished, axis_name)
        summed: jax.Array = assume_mirrored(chunks.ravel()[: value.size].reshape(value.shape))
        return summed


def _next(axis_name: str) -> list[tuple[int, int]]:
    replicas = jax.lax.axis_size(axis_name)
    return [(i, (i + 1) % replicas) for i in range(replicas)]


def _reduce_scatter(chunks: jax.Array, axis_name: str) -> jax.Array:
    """Gives the finished chunk ``me + 1``: every other replica added to it before this one."""
    replicas, me = len(chunks), jax.lax.axis_index(axis_name)
    own = chunks.astype(wide(chunks.dtype))

    def step(i: int, partial_sum: jax.Array) -> jax.Array:
        received: jax.Array = jax.lax.ppermute(partial_sum, axis_name, _next(axis_name))
        return received + own[(me - i - 1) % replicas]

    finished: jax.Array = jax.lax.fori_loop(0, replicas - 1, step, own[me])
    return finished.astype(chunks.dtype)


def _all_gather(finished: jax.Array, axis_name: str) -> jax.Array:
    """Gives all chunks in order, each as the replica that finished it has it."""
    replicas, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    chunks = jnp.zeros((replicas, *finished.shape), finished.dtype)

    def step(i: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunks, chunk = state
        chunk = jax.lax.ppermute(chunk, axis_name, _next(axis_name))
        return chunks.at[(me - i) % replicas].set(chunk), chunk

    start = chunks.at[(me + 1) % replicas].set(finished), finished
    gathered: jax.Array = jax.lax.fori_loop(0, replicas - 1, step, start)[0]
    return gathered
