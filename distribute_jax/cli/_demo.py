"""``distribute-jax demo``: trains a small model on all replicas, without further packages or data."""

from __future__ import annotations

import argparse

import jax
import numpy as np
from flax import nnx

from distribute_jax.cli._launch import MAX_ON_ONE_MACHINE, at_least
from distribute_jax.cluster_resolver import LaunchedClusterResolver
from distribute_jax.losses import SparseCategoricalCrossentropy
from distribute_jax.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
)
from distribute_jax.testing import simulate
from distribute_jax.training import Model

HELP = "train a small model over simulated devices, or in the processes of launch"


def add_options(command: argparse.ArgumentParser) -> None:
    text = "number of simulated devices (4)"
    command.add_argument(
        "--devices", type=at_least(1, MAX_ON_ONE_MACHINE), default=4, metavar="M", help=text
    )


def run(options: argparse.Namespace) -> int:
    """Trains, and prints the losses beside those of one device."""
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
    print(f"largest difference of {len(one)} epochs: {np.abs(many - one).max():.1e}")
    return 0


def _trained(strategy: Strategy) -> np.ndarray:
    """Returns the loss of each epoch, whose last batch is partial."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 20)).astype(np.float32)
    y = (x @ rng.normal(size=(20, 3))).argmax(axis=1)
    with strategy.scope():
        layers = nnx.Linear(20, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 3, rngs=nnx.Rngs(1))
        model = Model(nnx.Sequential(*layers))
    model.compile("adam", SparseCategoricalCrossentropy(from_logits=True))
    return np.array(model.fit(x, y, batch_size=96, epochs=10, verbose=0).history["loss"])
