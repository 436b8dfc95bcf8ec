"""Flax by itself, as its guide to several devices has it: state is divided where ``nnx.jit`` makes it."""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks.peers._flax_models import example_losses, model_of, optimizer
from benchmarks.peers._jax_loop import JaxTrainer, mesh_of, placed_batches
from benchmarks.peers._protocol import Start, serve


def build(start: Start) -> JaxTrainer:
    """Makes the step; what one device does without is marked."""
    mesh = mesh_of(start.replicas)  # many
    split = NamedSharding(mesh, P("data"))  # many

    def place(leaf: jax.Array) -> jax.Array:  # many
        fits = [d for d, n in enumerate(leaf.shape) if n % start.replicas == 0]  # many
        spec = [None] * fits[0] + ["data"] if fits and leaf.size >= 1024 else []  # many
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, P(*spec)))  # many

    @nnx.jit  # many
    def create() -> Any:  # many
        model = model_of(start)
        adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
        nnx.update((model, adam), jax.tree.map(place, nnx.state((model, adam))))  # many
        return model, adam  # many

    @nnx.jit
    def train_step(model: nnx.Module, adam: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean(example_losses(model(x), y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        adam.update(model, grads)
        return loss

    with jax.set_mesh(mesh):  # many
        model, adam = create()  # many

    def step(batch: Any) -> jax.Array:
        with jax.set_mesh(mesh):  # many
            return train_step(model, adam, *batch)

    batches = placed_batches(start, split)  # many
    return JaxTrainer(step, float, batches, lambda: nnx.state((model, adam)))


if __name__ == "__main__":
    serve(build, jax, flax, optax)
