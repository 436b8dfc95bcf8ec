"""``distribute-jax demo``: a small training over all replicas, which needs nothing but the package."""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax
from flax import nnx

from distribute_jax.cluster_resolver import LaunchedClusterResolver
from distribute_jax.losses import compute_average_loss
from distribute_jax.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    get_replica_context,
)
from distribute_jax.testing import simulate

_EPOCHS = 3


HELP = "train a small model over simulated devices, or in the processes of launch"
DESCRIPTION = HELP.capitalize() + "."


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    text = "number of simulated devices (4)"
    command.add_argument("--devices", type=int, default=4, metavar="M", help=text)


def run(options: argparse.Namespace) -> int:
    """Trains, and prints how the losses differ from those of one device."""
    if LaunchedClusterResolver.is_present():
        strategy: Strategy = MultiWorkerMirroredStrategy()
        losses = _trained(strategy)
        print(f"{strategy.num_replicas_in_sync} replicas: loss {losses[0]:.4f} → {losses[-1]:.4f}")
        return 0
    simulate(options.devices)
    one = _trained(OneDeviceStrategy(jax.devices()[0]))
    many = _trained(MirroredStrategy())
    print(f"one device:   loss {one[0]:.4f} → {one[-1]:.4f}")
    print(f"{options.devices} replicas:   loss {many[0]:.4f} → {many[-1]:.4f}")
    print(f"largest difference of {len(one)} steps: {np.abs(many - one).max():.1e}")
    return 0


def _trained(strategy: Strategy) -> np.ndarray:
    """Returns the loss of each step."""
    with strategy.scope():
        layers = nnx.Linear(20, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 3, rngs=nnx.Rngs(1))
        model = nnx.Sequential(*layers)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_of(model: nnx.Sequential) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return compute_average_loss(losses)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        replica = get_replica_context()
        optimizer.update(model, replica.all_reduce("sum", gradients))
        total: jax.Array = replica.all_reduce("sum", loss)
        return total

    dataset = strategy.distribute_dataset(_batches())
    losses = [strategy.run(train_step, batch) for _ in range(_EPOCHS) for batch in dataset]
    return np.array([float(loss) for loss in losses])


def _batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns examples of three classes; the last batch is partial."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 20)).astype(np.float32)
    y = (x @ rng.normal(size=(20, 3))).argmax(axis=1)
    return [(x[i : i + 96], y[i : i + 96]) for i in range(0, len(x), 96)]
