"""A training loop that can be killed at any moment, and continues where it stopped.

    python examples/resume.py        kill it with Ctrl-C or `kill -9`, and start it again
    python examples/resume.py --directory /tmp/other --steps 1000 --every 50

Model, optimizer, random numbers and the position in the data are saved while the loop runs. However
often it was killed, the final weights are those of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

import jax
import numpy as np
import optax
from digits import SIMULATED_DEVICES, load_data, positive
from flax import nnx

import distribute_jax as dj


class Network(nnx.Module):
    """Images (batch, 8, 8, 1) to logits (batch, 10), with random numbers for dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns one row of logits for each image."""
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(self.dropout(x))


def train_step(model: Network, optimizer: dj.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """Takes one step on this replica's share of the global batch; returns the loss of the batch."""

    def loss_fn(model: Network) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
        return dj.compute_average_loss(losses)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return dj.get_replica_context().all_reduce("sum", loss)


def train(strategy: dj.Strategy, directory: str, steps: int, every: int) -> Network:
    """Trains until a step, from the newest checkpoint in the directory if there is one.

    Args:
        strategy: may differ from that of the interrupted run.
        directory: the directory of the checkpoints.
        steps: the last step, counted from 1.
        every: the number of steps between checkpoints.
    """
    with strategy.scope():
        model = Network(nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.adam(1e-3))
    images, labels = load_data()[0]
    batches = dj.data.from_arrays((images, labels)).shuffle(seed=0).repeat().batch(64)
    state = {
        "model": model,
        "optimizer": optimizer,
        "data": iter(strategy.distribute_dataset(batches)),
    }
    with dj.CheckpointManager(directory, every_steps=every) as manager:
        done = manager.restore_latest(state) or 0
        print(f"Resuming after step {done}.", flush=True)
        for step in range(done + 1, steps + 1):
            loss = strategy.run(train_step, args=(model, optimizer, *next(state["data"])))
            manager.save(step, state, force=step == steps)
            if step % 10 == 0:
                print(f"step {step}/{steps}  loss {float(loss):.4f}", flush=True)
    return model


def digest(model: nnx.Module) -> str:
    """Returns a short hash of all weights."""
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        sha256.update(np.asarray(leaf).tobytes())
    return sha256.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts or resumes training, and prints a hash of the weights."""
    options = parser().parse_args(arguments)
    if options.devices == "simulated":
        dj.simulate(SIMULATED_DEVICES)
    strategy = dj.MirroredStrategy(list(range(options.replicas or jax.device_count())))
    model = train(strategy, options.directory, options.steps, options.every)
    print(f"Weights after step {options.steps}: {digest(model)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--directory", default="resume-checkpoints", help="default: %(default)s")
    cli.add_argument("--steps", type=positive, default=2000, help="default: %(default)s")
    cli.add_argument(
        "--every", type=positive, default=20, help="steps between checkpoints (%(default)s)"
    )
    cli.add_argument("--replicas", type=positive, help="default: all devices")
    cli.add_argument(
        "--devices",
        choices=("simulated", "real"),
        default="simulated",
        help=f"{SIMULATED_DEVICES} simulated CPU devices (default), or those that JAX finds",
    )
    return cli


if __name__ == "__main__":
    main()
