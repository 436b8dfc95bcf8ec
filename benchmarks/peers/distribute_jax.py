"""Ours: a step under ``MirroredStrategy.run``, as a user writes it."""

from __future__ import annotations

from typing import Any

import flax
import jax
import optax
from flax import nnx

import distribute_jax as dj
from benchmarks.peers._flax_models import example_losses, model_of, optimizer
from benchmarks.peers._jax_loop import JaxTrainer
from benchmarks.peers._protocol import Start, serve


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    return train_under(dj.MirroredStrategy(list(range(start.replicas))), start)


def train_under(strategy: dj.Strategy, start: Start) -> JaxTrainer:
    """Makes the step, which is the same under every strategy; what one device does without is marked."""
    with strategy.scope():  # many
        model = model_of(start)
        adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return dj.compute_average_loss(example_losses(model(x), y))  # many

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        adam.update(model, dj.get_replica_context().all_reduce("sum", grads))  # many
        return loss

    batches = list(zip(start.x, start.y, strict=True))
    return JaxTrainer(
        step=lambda batch: strategy.run(train_step, args=batch),  # many
        read=lambda loss: float(strategy.reduce("sum", loss, axis=None)),  # many
        placed=list(strategy.distribute_dataset(batches)),  # many
        state=lambda: nnx.state((model, adam)),
    )


if __name__ == "__main__":
    serve(build, jax, flax, optax)
