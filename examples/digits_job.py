"""Training in many processes that may be stopped at any moment, and continues where it stopped.

    distribute-jax launch --processes 2 --devices-per-process 1 examples/digits_job.py
    python examples/digits_job.py                run by a scheduler on each host
    python examples/digits_job.py --tpu          the same on each host of a TPU

All processes take part in each step and each checkpoint; the first one prints. However often the job was
killed or preempted, the final weights are those of an uninterrupted job, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import optax
from digits import CNN, load_data, positive
from flax import nnx
from resume import digest

import distribute_jax as dj

SHOWN_EVERY = 10
START_SECONDS = 300.0
"""The hosts of a scheduler are not ready at the same time: one may still pull an image."""


def train_step(model: CNN, optimizer: dj.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """Takes one step on this replica's share of the global batch; returns the loss of the batch."""

    def loss_fn(model: CNN) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
        return dj.compute_average_loss(losses)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return dj.get_replica_context().all_reduce("sum", loss)


def train(
    strategy: dj.Strategy,
    options: argparse.Namespace,
    is_preempted: Callable[[], bool] | None = None,
) -> CNN:
    """Trains until a step, from the newest checkpoint in the directory if there is one."""
    with strategy.scope():
        model = CNN(jax.numpy.float32, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.adam(3e-3))
    images, labels = load_data()[0]
    source = dj.data.from_arrays((images, labels)).shuffle(seed=0)
    batches = iter(strategy.distribute_dataset(source.batch(options.batch_size).repeat()))
    state = {"model": model, "optimizer": optimizer}
    with (
        dj.CheckpointManager(options.directory, every_steps=options.every) as manager,
        manager.preemptible(state, batches, termination_watcher_fn=is_preempted) as loop,
    ):
        say(f"Resuming after step {loop.step}, on {strategy.num_replicas_in_sync} replicas.")
        while loop.step < options.steps:
            loss = strategy.run(train_step, args=(model, optimizer, *next(batches)))
            if loop.step % SHOWN_EVERY == 0:
                say(f"step {loop.step}/{options.steps}  loss {float(loss):.4f}")
    return model


def say(text: str) -> None:
    """Prints a line in the first process only."""
    if dj.is_chief():
        print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts or resumes training, and prints a hash of the weights."""
    options = parser().parse_args(arguments)
    # The strategy comes first: it connects the processes before anything computes.
    make = dj.TPUStrategy if options.tpu else dj.MultiWorkerMirroredStrategy
    strategy = make(cluster_options=dj.ClusterOptions(start_seconds=START_SECONDS))
    model = train(strategy, options)
    say(f"Weights after step {options.steps}: {digest(model)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--steps", type=positive, default=300, help="default: %(default)s")
    cli.add_argument(
        "--directory",
        default="job-checkpoints",
        help="for the checkpoints, the same for all processes; default: %(default)s",
    )
    cli.add_argument(
        "--batch-size", type=positive, default=64, help="examples in a global batch (%(default)s)"
    )
    cli.add_argument(
        "--every", type=positive, default=20, help="steps between checkpoints (%(default)s)"
    )
    cli.add_argument("--tpu", action="store_true", help="with dj.TPUStrategy")
    return cli


if __name__ == "__main__":
    main()
