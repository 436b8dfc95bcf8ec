"""One epoch of training on data in memory: through ``fit``, through ``run``, and written by hand.

Every column starts from the same weights, takes the same batches in the same order, and gives their loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import distribute_jax as dj
from benchmarks._loops import hand_written_loop, in_batches, mean_loss
from benchmarks._workloads import Workload, example_losses

Epoch = Callable[[], float]
"""Trains for one epoch, and gives its loss."""


def with_fit(work: Workload, replicas: int, together: int) -> Epoch:
    """``Model.fit`` on the arrays."""
    x, y = work.data(work.batch * work.batches)
    with dj.MirroredStrategy(list(range(replicas))).scope():
        model = dj.Model(work.model(nnx.Rngs(0)))
        loss = dj.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(work.optimizer(), loss, steps_per_execution=together)

    def epoch() -> float:
        history = model.fit(x, y, batch_size=work.batch, shuffle=False, verbose=0)
        return float(history.history["loss"][0])

    return epoch


def with_run(work: Workload, replicas: int, together: int) -> Epoch:
    """A loop of one's own over ``strategy.run``, or ``run_steps``."""
    x, y = work.data(work.batch * work.batches)
    strategy = dj.MirroredStrategy(list(range(replicas)))
    with strategy.scope():
        module = work.model(nnx.Rngs(0))
        optimizer = dj.Optimizer(module, work.optimizer())
        mean = dj.metrics.Average("loss")

    def step(x: jax.Array, y: jax.Array) -> None:
        def loss_fn(module: Any) -> tuple[jax.Array, jax.Array]:
            losses = example_losses(module(x), y)
            return dj.compute_average_loss(losses), losses

        grads, losses = nnx.grad(loss_fn, has_aux=True)(module)
        optimizer.update(module, grads)
        mean.update(loss=losses)

    batches = strategy.distribute_dataset(dj.data.from_arrays((x, y)).batch(work.batch))

    def epoch() -> float:
        mean.reset()
        iterator = iter(batches)
        if together == 1:
            for batch in iterator:
                strategy.run(step, args=batch)
        else:
            for _ in range(-(-work.batches // together)):
                strategy.run_steps(step, iterator, together)
        return float(mean.compute())

    return epoch


def by_hand(work: Workload, replicas: int, together: int) -> Epoch:
    """The best loop over the hand-written step, as many batches in a dispatch."""
    loop = hand_written_loop(work, in_batches(work, together), replicas, together)
    return lambda: mean_loss(loop(), work.batches)
