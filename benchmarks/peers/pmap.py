"""Hand-written JAX: ``jax.pmap`` over state and batches with a leading dim for the devices."""

from __future__ import annotations

import flax
import jax
import numpy as np
import optax

from benchmarks.peers._jax_loop import JaxTrainer, carried, flat_step, shardings_of, sum_of_shares
from benchmarks.peers._protocol import Array, Start, serve


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    step, leaves = flat_step(start, summed=True)
    _, _, split = shardings_of(start.replicas)
    mapped = jax.pmap(
        step,
        axis_name="data",
        devices=jax.devices()[: start.replicas],
        donate_argnums=tuple(range(len(leaves))),
    )
    state = [jax.device_put(np.stack([leaf] * start.replicas), split) for leaf in leaves]

    def shares(part: Array) -> jax.Array:
        divided = part.reshape(start.replicas, -1, *part.shape[1:])
        return jax.device_put(divided, split)

    batches = [(shares(x), shares(y)) for x, y in zip(start.x, start.y, strict=True)]
    return JaxTrainer(carried(mapped, state), sum_of_shares, batches)


if __name__ == "__main__":
    serve(build, jax, flax, optax)
