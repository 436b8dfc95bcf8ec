"""A training program that is killed once, for the tests of elastic jobs: it prints its batches."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import distribute_jax as dj

ROWS, BATCH, EPOCHS = 60, 8, 3


class Net(nnx.Module):
    """Two layers, with dropout between them."""

    def __init__(self, rngs, drop):
        self.first = nnx.Linear(1, 8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)
        self.dropout = nnx.Dropout(drop, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x / ROWS))))


def own_loop(strategy, directory, drop, until=None):
    """Yields the step, the ids of its global batch in order, and its loss; saves after a last step."""
    with strategy.scope():
        model = Net(nnx.Rngs(0), drop)
        optimizer = dj.Optimizer(model, optax.adam(optax.exponential_decay(0.05, 5, 0.7)))
    ids = np.arange(ROWS, dtype=np.float32)[:, None]
    source = dj.data.from_arrays(ids).shuffle(seed=1).batch(BATCH).repeat(EPOCHS)
    batches = iter(strategy.distribute_dataset(source))

    def step(x):
        loss, gradients = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(((model(x) - x / ROWS) ** 2)[:, 0])
        )(model)
        optimizer.update(model, gradients)
        return dj.get_replica_context().all_reduce("sum", loss)

    with (
        dj.CheckpointManager(directory, every_steps=4) as manager,
        manager.preemptible({"model": model, "optimizer": optimizer}, batches) as loop,
    ):
        for x in batches:
            loss = strategy.run(step, args=(x,))
            rows = strategy.gather(x, axis=0)
            yield loop.step, [int(i) for i in np.asarray(rows)[:, 0]], float(loss)
            if loop.step == until:
                break
    dj.check_in_sync((model, optimizer))


def main():
    directory, rank, at, drop = sys.argv[1:]
    strategy = dj.MultiWorkerMirroredStrategy()
    dies = (rank, "0") == tuple(
        os.environ[f"DISTRIBUTE_JAX_{x}"] for x in ("PROCESS_ID", "ATTEMPT")
    )
    for step, ids, loss in own_loop(strategy, directory, float(drop)):
        if dj.is_chief():
            print(
                "step", json.dumps([step, jax.process_count(), ids, loss, time.time()]), flush=True
            )
        time.sleep(0.1)  # so that there is time to join again
        if dies and step == int(at):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
