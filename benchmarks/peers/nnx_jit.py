"""Flax by itself: ``nnx.jit`` over a sharded batch, model and optimizer as arguments."""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.peers._flax_models import example_losses, model_of, optimizer
from benchmarks.peers._jax_loop import JaxTrainer, placed_batches, shardings_of
from benchmarks.peers._protocol import Start, serve


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    mesh, _, split = shardings_of(start.replicas)
    with jax.set_mesh(mesh):
        model = model_of(start)
        adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: nnx.Module, adam: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean(example_losses(model(x), y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        adam.update(model, grads)
        return loss

    def step(batch: Any) -> jax.Array:
        with jax.set_mesh(mesh):
            return train_step(model, adam, *batch)

    return JaxTrainer(step, float, placed_batches(start, split))


if __name__ == "__main__":
    serve(build, jax, flax, optax)
