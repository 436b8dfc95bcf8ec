"""Loops that get SIGTERM, for the tests of preemption over processes."""

from __future__ import annotations

import hashlib
import time

import fault_functions
import jax
import numpy as np
from flax import nnx

import distribute_jax as dj


def loop(directory, pause):
    """Trains with dropout and shuffled data; gives the digest of all that is saved."""
    strategy = fault_functions.make_strategy(step_seconds=30.0)
    step, model = fault_functions.make_step(strategy)
    rows = np.arange(240, dtype=np.float32).reshape(60, 4) / 240
    source = dj.data.from_arrays(rows).shuffle(seed=1).batch(2).repeat(2)
    iterator = iter(strategy.distribute_dataset(source))
    first = None
    with (
        dj.CheckpointManager(directory, max_to_keep=None) as manager,
        manager.preemptible({"model": model}, iterator, grace_seconds=20.0) as block,
    ):
        for x in iterator:
            first = block.step if first is None else first
            strategy.run(step, args=(x,))
            time.sleep(pause * (1 + jax.process_index()))
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(model)):
        total.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return {"first": first, "last": block.step, "weights": total.hexdigest()}


def never_polls(directory):
    """A job without a preemptible loop."""
    del directory
    return fault_functions.loop(10_000)
