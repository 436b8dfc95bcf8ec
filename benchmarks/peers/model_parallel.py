"""Ours: a step under ``ModelParallelStrategy``, each replica on two devices."""

from __future__ import annotations

import flax
import jax
import optax
from jax.sharding import PartitionSpec as P

import distribute_jax as dj
from benchmarks.peers._jax_loop import JaxTrainer
from benchmarks.peers._protocol import Start, serve
from benchmarks.peers.distribute_jax import train_under

RULES = {
    r"(query|key|value)\.kernel": P(None, "model", None),  # many
    r"out\.kernel": P("model", None, None),  # many
    r"(up|head)\.kernel": P(None, "model"),  # many
    r"down\.kernel|tokens": P("model", None),  # many
}


def build(start: Start) -> JaxTrainer:
    """Makes the step."""
    devices = list(range(start.replicas))
    strategy = dj.ModelParallelStrategy(devices, model=2, rules=RULES, fully_sharded=False)  # many
    return train_under(strategy, start)


if __name__ == "__main__":
    serve(build, jax, flax, optax)
