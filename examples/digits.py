"""Train a small CNN on handwritten digits over several replicas, then check it against one device.

    python examples/digits.py                    8 simulated devices, on any machine
    python examples/digits.py --replicas 4       only four of them
    python examples/digits.py --devices real     the GPUs, TPU cores or CPU that JAX finds

The 1,797 images of 8 × 8 pixels come with scikit-learn, so nothing is downloaded. The program
first trains on all replicas and prints the accuracy on test images. Then it trains from the same
seeds on 1, 2, 4 and 8 replicas and shows how far their losses are from those of one device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, Progress
from rich.table import Table

import distribute_jax as dj

SIMULATED_DEVICES = 8
COMPARED_REPLICAS = (1, 2, 4, 8)
COMPARED_EPOCHS = 3
BOUNDS = {"float32": 1e-5, "float64": 1e-10}
"""Relative differences from one device below these are rounding."""

console = Console(markup=False, highlight=False)


# The model and the data: plain Flax and NumPy.


class CNN(nnx.Module):
    """Two convolutions and a linear layer: images (batch, 8, 8, 1) to logits (batch, 10)."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), param_dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns one row of logits for each image."""
        x = nnx.relu(self.conv1(x))
        x = nnx.relu(self.conv2(x))
        return self.head(x.reshape(x.shape[0], -1))


class Digits(NamedTuple):
    """Images with pixels from 0 to 1, of shape (examples, 8, 8, 1), and their labels 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def batches(
        self, batch_size: int, seed: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields global batches, shuffled if there is a seed; the last one is smaller."""
        order = np.arange(len(self.labels))
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            yield self.images[rows], self.labels[rows]


def load_data() -> tuple[Digits, Digits]:
    """Returns 1,437 images to train on and 360 to test with, always the same ones."""
    from sklearn.datasets import load_digits  # here, since it takes seconds

    digits = load_digits()
    images, labels = digits.images[..., None] / 16.0, digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1437], order[1437:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


# The steps: code for one replica, which gets its share of each global batch.


class Steps(NamedTuple):
    """The training step and the test step of a model."""

    train: Callable[[jax.Array, jax.Array], dict[str, jax.Array]]
    test: Callable[[jax.Array, jax.Array], jax.Array]


def make_steps(strategy: dj.Strategy, dtype: Any = jnp.float32) -> Steps:
    """Builds a model from fixed seeds under the strategy, and the steps that use it."""
    with strategy.scope():
        model = CNN(dtype, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    def train_step(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        def loss_fn(model: CNN) -> tuple[jax.Array, jax.Array]:
            logits = model(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            # This replica's part of the mean over the real examples of the global batch.
            return dj.compute_average_loss(losses), logits

        (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        replica = dj.get_replica_context()
        optimizer.update(model, replica.all_reduce("sum", gradients))
        return replica.all_reduce("sum", {"loss": loss, "correct": count_correct(logits, y)})

    def test_step(x: jax.Array, y: jax.Array) -> jax.Array:
        return dj.get_replica_context().all_reduce("sum", count_correct(model(x), y))

    return Steps(train_step, test_step)


def count_correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Counts the correct predictions of this replica, without the padding of a partial batch."""
    is_real = dj.get_replica_context().batch_mask
    return jnp.sum((logits.argmax(axis=-1) == labels) & is_real)


# The loops: ordinary Python over distributed batches.


class StepResult(NamedTuple):
    """What one step of training reports."""

    examples: int
    loss: float
    correct: int


def train_epoch(
    strategy: dj.Strategy, steps: Steps, data: Digits, batch_size: int, epoch: int
) -> Iterator[StepResult]:
    """Trains for one epoch, in an order of the examples that depends on the epoch only."""
    sizes = [len(labels) for _, labels in data.batches(batch_size)]
    batches = strategy.distribute_dataset(lambda: data.batches(batch_size, seed=epoch))
    for size, (x, y) in zip(sizes, batches, strict=True):
        result = strategy.run(steps.train, args=(x, y))
        yield StepResult(size, float(result["loss"]), int(result["correct"]))


def train(strategy: dj.Strategy, steps: Steps, data: Digits, batch_size: int, epochs: int) -> None:
    """Trains with a progress bar in a terminal, and prints a line for each epoch."""
    columns = ["{task.description}", BarColumn(), "{task.fields[shown]}"]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total = epochs * -(-len(data.labels) // batch_size)
        bar = progress.add_task("compiling", total=total, shown="")
        for epoch in range(epochs):
            name, started, done = f"epoch {epoch + 1:2}/{epochs}", time.perf_counter(), []
            for step in train_epoch(strategy, steps, data, batch_size, epoch):
                done.append(step)
                shown = summary(done, time.perf_counter() - started)
                progress.update(bar, advance=1, description=name, shown=shown)
            console.print(f"{name}  {shown}")


def summary(steps: Sequence[StepResult], seconds: float) -> str:
    """Returns a text about the epoch so far: means over the examples, and the speed."""
    examples = sum(step.examples for step in steps)
    loss = sum(step.loss * step.examples for step in steps) / examples
    accuracy = sum(step.correct for step in steps) / examples
    return f"loss {loss:.4f}  accuracy {accuracy:.3f}  {examples / seconds:6,.0f} examples/s"


def accuracy_on(strategy: dj.Strategy, steps: Steps, data: Digits, batch_size: int) -> float:
    """Returns the accuracy over exactly the images of the data."""
    batches = strategy.distribute_dataset(lambda: data.batches(batch_size))
    correct = [strategy.run(steps.test, args=(x, y)) for x, y in batches]
    return sum(int(count) for count in correct) / len(data.labels)


# The comparison: the same run, from the same seeds, on more and more replicas.


def losses_on(replicas: int, dtype: str, data: Digits, batch_size: int, epochs: int) -> np.ndarray:
    """Returns the loss of every step, shape (epochs, steps of an epoch)."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    # float64 must be switched on while the arrays are made and the steps are compiled.
    with jax.enable_x64(dtype == "float64"):
        steps = make_steps(strategy, jnp.dtype(dtype))
        runs = [train_epoch(strategy, steps, data, batch_size, epoch) for epoch in range(epochs)]
        return np.array([[step.loss for step in run] for run in runs])


def compare(counts: Sequence[int], dtype: str, data: Digits, batch_size: int, epochs: int) -> float:
    """Prints a table of the losses; returns the largest relative difference from one device."""
    sizes = [len(labels) for _, labels in data.batches(batch_size)]
    table = Table(title=f"\nThe same run in {dtype} on {', '.join(map(str, counts))} replicas")
    for name in ["replicas", *(f"loss, epoch {i + 1}" for i in range(epochs)), "difference"]:
        table.add_column(name, justify="right")
    one_device = losses_on(1, dtype, data, batch_size, epochs)
    largest = 0.0
    for count in counts:
        losses = losses_on(count, dtype, data, batch_size, epochs) if count > 1 else one_device
        difference = float(np.max(np.abs(losses - one_device) / np.abs(one_device)))
        largest = max(largest, difference)
        means = np.average(losses, axis=1, weights=sizes)
        table.add_row(str(count), *(f"{mean:.10f}" for mean in means), f"{difference:.1e}")
    console.print(table)
    return largest


def print_comparison(counts: Sequence[int], data: Digits, batch_size: int, epochs: int) -> bool:
    """Compares in float32 and float64; returns whether every run equals the one on one device."""
    equal = True
    console.print(
        "\nNow the same run, from the same seeds, on one device and on several. A difference is "
        "the largest of any step's loss, relative to that step on one device. The last batch of an "
        f"epoch has {len(data.labels) % batch_size or batch_size} examples instead of {batch_size}."
    )
    for dtype, bound in BOUNDS.items():
        largest = compare(counts, dtype, data, batch_size, epochs)
        within = largest < bound
        equal = equal and within
        verdict = f"below {bound:.0e}: rounding" if within else f"NOT below {bound:.0e}"
        console.print(f"{dtype}: largest difference from one device {largest:.1e}, {verdict}")
    return equal


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 1 if a run differs from one device."""
    options = parser(__doc__).parse_args(arguments)
    if options.devices == "simulated":
        dj.simulate(SIMULATED_DEVICES)
    # By default GPUs and TPUs round float32 products to fewer bits.
    jax.config.update("jax_default_matmul_precision", "float32")
    available = jax.device_count()
    strategy = dj.MirroredStrategy(list(range(options.replicas or available)))
    train_data, test_data = load_data()

    console.print(
        f"Training on {len(train_data.labels)} images, over {strategy.num_replicas_in_sync} "
        f"replicas ({jax.devices()[0].device_kind}). The first epoch includes compiling the step."
    )
    steps = make_steps(strategy)
    train(strategy, steps, train_data, options.batch_size, options.epochs)
    accuracy = accuracy_on(strategy, steps, test_data, options.batch_size)
    console.print(f"Test accuracy: {accuracy:.4f}, on {len(test_data.labels)} other images.")

    counts = [count for count in COMPARED_REPLICAS if count <= available]
    epochs = min(options.epochs, COMPARED_EPOCHS)
    return 0 if print_comparison(counts, train_data, options.batch_size, epochs) else 1


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parser(description: str) -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--replicas", type=positive, help="default: all devices")
    cli.add_argument("--epochs", type=positive, default=15, help="default: %(default)s")
    cli.add_argument(
        "--batch-size", type=positive, default=64, help="examples in a global batch (%(default)s)"
    )
    cli.add_argument(
        "--devices",
        choices=("simulated", "real"),
        default="simulated",
        help=f"{SIMULATED_DEVICES} simulated CPU devices (default), or those that JAX finds",
    )
    return cli


if __name__ == "__main__":
    sys.exit(main())
