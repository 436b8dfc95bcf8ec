"""Ours: a step under ``FullyShardedStrategy``."""

from __future__ import annotations

import flax
import jax
import optax

import distribute_jax as dj
from benchmarks.peers._jax_loop import JaxTrainer
from benchmarks.peers._protocol import Start, serve
from benchmarks.peers.distribute_jax import train_under


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    strategy = dj.FullyShardedStrategy(list(range(start.replicas)))  # many
    return train_under(strategy, start)


if __name__ == "__main__":
    serve(build, jax, flax, optax)
