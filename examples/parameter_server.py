"""Train on handwritten digits with parameter servers: workers compute, servers update the model.

    python examples/parameter_server.py                             4 workers, threads of this process
    python examples/parameter_server.py --engine processes          4 workers and 2 servers, processes
    python examples/parameter_server.py --engine processes --kill   one of each is killed in each epoch

It is TensorFlow's tutorial "Parameter server training" for the images of scikit-learn and the model of
examples/digits.py. Each worker goes through the images in a separate order, and nobody waits for the
slowest: an update may be computed from weights that are a few updates old. Each scheduled step is applied
exactly once, also when processes end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import CNN, SIMULATED_DEVICES, Digits, console, load_data, positive
from flax import nnx

import distribute_jax as dj
from distribute_jax.coordinator import (
    ClusterCoordinator,
    experimental_get_current_worker_index,
)

BATCH_SIZE = 64


def batches_of_worker(data: Digits) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields full batches forever, in an order that differs between workers."""
    worker, epoch = experimental_get_current_worker_index(), 0
    while True:
        for x, y in data.batches(BATCH_SIZE, seed=1000 * worker + epoch):
            if len(y) == BATCH_SIZE:
                yield x, y
        epoch += 1


def train(strategy: dj.ParameterServerStrategy, data: Digits, epochs: int, kill: bool) -> CNN:
    """Schedules as many steps as there are batches in an epoch, joins after each, and returns the model."""
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        model = CNN(jnp.float32, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def train_step(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        def loss_fn(model: CNN) -> tuple[jax.Array, jax.Array]:
            logits = model(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return dj.compute_average_loss(losses), logits

        (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        replica = dj.get_replica_context()
        optimizer.update(model, replica.all_reduce("sum", gradients))
        return {"loss": loss, "accuracy": jnp.mean(logits.argmax(axis=-1) == y)}

    def scheduled_step(iterator: Any) -> dict[str, jax.Array]:
        return strategy.run(train_step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(lambda: batches_of_worker(data)))
    number = len(data.labels) // BATCH_SIZE
    for epoch in range(epochs):
        started = time.perf_counter()
        remote = [coordinator.schedule(scheduled_step, args=(iterator,)) for _ in range(number)]
        if kill:
            dj.testing.kill(strategy, worker=epoch % strategy.workers)
            dj.testing.kill(strategy, server=epoch % strategy.servers)
        coordinator.join()
        results = jax.tree.map(lambda *values: np.mean(values), *coordinator.fetch(remote))
        speed = number / (time.perf_counter() - started)
        console.print(
            f"epoch {epoch + 1:2}/{epochs}  loss {results['loss']:.4f}  "
            f"accuracy {results['accuracy']:.3f}  {speed:5.0f} steps/s"
        )
    stats = coordinator.stats
    console.print(
        f"{stats.version} updates; by how stale they were: {dict(sorted(stats.staleness.items()))}; "
        f"by worker: {stats.applied}."
    )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 1 if an update was lost or applied twice."""
    options = parser().parse_args(arguments)
    if options.kill and options.engine == "threads":
        parser().error("--kill needs --engine processes or ray: threads cannot be killed")
    if options.devices == "simulated":
        dj.simulate(SIMULATED_DEVICES)
    strategy = dj.ParameterServerStrategy(
        engine=options.engine, workers=options.workers, servers=options.servers
    )
    train_data, test_data = load_data()
    model = train(strategy, train_data, options.epochs, options.kill)
    accuracy = float(np.mean(model(test_data.images).argmax(axis=-1) == test_data.labels))
    console.print(f"Test accuracy: {accuracy:.4f}, on {len(test_data.labels)} other images.")
    expected = options.epochs * (len(train_data.labels) // BATCH_SIZE)
    return int(ClusterCoordinator(strategy).stats.version != expected)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--engine", choices=["threads", "processes", "ray"], default="threads")
    cli.add_argument("--workers", type=positive, default=4, help="default: %(default)s")
    cli.add_argument("--servers", type=positive, default=2, help="default: %(default)s")
    cli.add_argument("--epochs", type=positive, default=15, help="default: %(default)s")
    cli.add_argument("--kill", action="store_true", help="end a worker and a server each epoch")
    cli.add_argument("--devices", choices=["simulated", "real"], default="simulated")
    return cli


if __name__ == "__main__":
    sys.exit(main())
