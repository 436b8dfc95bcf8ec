"""Ours: a step scheduled on the workers of ``ParameterServerStrategy``, which are threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import flax
import jax
import optax
from flax import nnx

import distribute_jax as dj
from benchmarks.peers._flax_models import example_losses, model_of, optimizer
from benchmarks.peers._protocol import Start, serve


class ServersTrainer:
    """Schedules a step for each batch."""

    def __init__(self, start: Start) -> None:
        strategy = dj.ParameterServerStrategy(workers=start.replicas)
        with strategy.scope():
            model = model_of(start)
            adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

        def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
            def loss_fn(model: Any) -> jax.Array:
                return dj.compute_average_loss(example_losses(model(x), y))

            loss, grads = nnx.value_and_grad(loss_fn)(model)
            adam.update(model, dj.get_replica_context().all_reduce("sum", grads))
            return loss

        self.step, self.coordinator = train_step, dj.coordinator.ClusterCoordinator(strategy)
        self.batches = cycle(jax.device_put(list(zip(start.x, start.y, strict=True))))

    def losses(self, steps: int) -> list[float]:
        """Trains one step after the other, and returns each one's loss."""
        return [float(self._schedule(1)[0].fetch()) for _ in range(steps)]

    def run(self, steps: int) -> None:
        """Trains, and returns when the last step has been applied."""
        self._schedule(steps)
        self.coordinator.join()

    def _schedule(self, steps: int) -> Sequence[Any]:
        return [self.coordinator.schedule(self.step, args=next(self.batches)) for _ in range(steps)]


if __name__ == "__main__":
    serve(ServersTrainer, jax, flax, optax)
