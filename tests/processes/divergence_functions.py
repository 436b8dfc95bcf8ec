"""Programs in which two processes diverge after their steps were compared, and one in which they do not."""

from __future__ import annotations

import time
import warnings

import jax
import numpy as np
from fault_functions import make_strategy
from flax import nnx

import distribute_jax as dj

STEPS = 400
"""Enough for a comparison; the loop ends with the error before."""


def prepared():
    """Returns a strategy, and steps that add to a variable with a factor, both compared before."""
    strategy = make_strategy(step_seconds=20)
    with strategy.scope():
        total = nnx.Param(np.zeros(3, np.float32))
        factor = nnx.Param(np.float32(1))

    def add(rate):
        total[...] = total[...] + rate * factor[...]

    def take(rate):
        total[...] = total[...] - 2 * rate * factor[...]

    for step in (add, take):
        strategy.run(step, args=(0.5,))
    return strategy, add, take, total, factor


def on_process_1():
    """Returns whether this is the process that diverges."""
    return jax.process_index() == 1


def passes_another_number():
    """Process 1 passes another number than process 0."""
    strategy, add, *_ = prepared()
    for _ in range(STEPS):
        strategy.run(add, args=(0.25 if on_process_1() else 0.125,))
        time.sleep(0.01)


def writes_another_value():
    """Process 1 writes another value between two steps."""
    strategy, add, _, _, factor = prepared()
    factor[...] = np.float32(7 if on_process_1() else 6)
    for _ in range(STEPS):
        strategy.run(add, args=(0.5,))
        time.sleep(0.01)


def runs_another_step():
    """Both steps were compared; then process 1 runs the one, and process 0 the other."""
    strategy, add, take, *_ = prepared()
    for _ in range(STEPS):
        strategy.run(take if on_process_1() else add, args=(0.5,))
        time.sleep(0.01)


def differs_at_the_end():
    """A program that has ended before anybody looked."""
    strategy, add, *_ = prepared()
    strategy.run(add, args=(0.25 if on_process_1() else 0.125,))


def stays_together():
    """Whatever may change and is the same on all: numbers, writes, snapshots, steps in turn, reductions.

    Variables get Python's own numbers too, and one step draws random numbers.
    """
    strategy, add, take, total, factor = prepared()
    with strategy.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    ones = np.ones(4, np.float32)
    for number in range(40):
        factor.set_value(float(number) if number % 2 else np.float32(number))
        strategy.run(dropout, args=(ones,))
        kept = dj.snapshot(total)
        strategy.run(add, args=(number / 8,))
        strategy.run(take, args=(np.float32(1),))
        total[...] = kept[...]
        own = strategy.experimental_distribute_values_from_function(
            lambda context: np.float32(context.replica_id_in_sync_group)
        )
        assert float(strategy.reduce("sum", own, axis=None)) == 1
        time.sleep(0.03)
    return np.asarray(total.get_raw_value().addressable_data(0)).tolist()


def shuffles_otherwise():
    """Each process shuffles with another seed."""
    strategy = make_strategy()
    x = np.random.default_rng(jax.process_index()).permutation(16).astype(np.float32)[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in strategy.distribute_dataset(dj.data.from_arrays(x).batch(4)):
            pass
    return [str(one.message) for one in caught if "first batches" in str(one.message)]
