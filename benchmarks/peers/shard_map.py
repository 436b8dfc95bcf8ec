"""Hand-written JAX: the donated ``jit(shard_map)`` over flat arrays, with a sum over the replicas."""

from __future__ import annotations

import flax
import jax
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.peers._jax_loop import (
    JaxTrainer,
    carried,
    flat_step,
    placed_batches,
    shardings_of,
    sum_of_shares,
)
from benchmarks.peers._protocol import Start, serve


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    step, leaves = flat_step(start, summed=True)
    mesh, whole, split = shardings_of(start.replicas)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(),) * len(leaves) + (P("data"),) * 2,
        out_specs=[P()] * len(leaves) + [P("data")],
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=tuple(range(len(leaves))))
    state = [jax.device_put(leaf, whole) for leaf in leaves]
    return JaxTrainer(carried(jitted, state), sum_of_shares, placed_batches(start, split))


if __name__ == "__main__":
    serve(build, jax, flax, optax)
