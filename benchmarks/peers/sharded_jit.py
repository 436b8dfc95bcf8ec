"""Hand-written JAX: ``jit`` over a sharded batch; the compiler finds the collectives."""

from __future__ import annotations

import flax
import jax
import optax

from benchmarks.peers._jax_loop import JaxTrainer, carried, flat_step, placed_batches, shardings_of
from benchmarks.peers._protocol import Start, serve


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    step, leaves = flat_step(start, summed=False)
    _, whole, split = shardings_of(start.replicas)
    jitted = jax.jit(
        step,
        in_shardings=(whole,) * len(leaves) + (split,) * 2,
        out_shardings=[whole] * (len(leaves) + 1),
        donate_argnums=tuple(range(len(leaves))),
    )
    state = [jax.device_put(leaf, whole) for leaf in leaves]
    return JaxTrainer(carried(jitted, state), float, placed_batches(start, split))


if __name__ == "__main__":
    serve(build, jax, flax, optax)
