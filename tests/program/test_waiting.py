"""A loop waits for an older step, so that the devices always have the next one to start."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj


def counting() -> tuple[nnx.Variable[Any], Any]:
    """A step without results, and its state."""
    total = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array) -> None:
        total[...] += dj.get_replica_context().all_reduce("sum", x.sum())

    return total, step


@pytest.mark.parametrize("lowering", ["shard_map", "pmap"])
@pytest.mark.parametrize(
    "strategy",
    [
        dj.MirroredStrategy([0, 1, 2, 3]),
        dj.MirroredStrategy([0], steps_in_flight=2),
        dj.CentralStorageStrategy([0, 1]),
    ],
    ids=["several devices", "one device", "central storage"],
)
def test_a_step_without_results_can_be_waited_for(strategy: dj.Strategy, lowering: Any):
    """Its token is not state, which later steps donate: else only the newest step could be waited for."""
    with strategy.scope():
        total, step = counting()
    for batch in strategy.distribute_dataset([np.ones(4, np.float32)] * 5):
        assert strategy.run(step, args=(batch,), options=dj.RunOptions(lowering=lowering)) is None
    tokens = [token for token, *_ in strategy._runner._in_flight]
    assert len(tokens) == 2
    for token in tokens:
        assert not token.is_deleted()
        assert token.block_until_ready().shape == ()
    assert float(total[...]) == 20.0


def test_one_device_has_no_limit():
    """It cannot deadlock, and waiting took a fifth of the host time of a small step."""
    strategy = dj.OneDeviceStrategy(0)
    total, step = counting()
    for _ in range(5):
        strategy.run(step, args=(jnp.ones(4),))
    assert not strategy._runner._in_flight
    assert float(total[...]) == 20.0


def test_several_steps_without_results_can_be_waited_for(s4: dj.MirroredStrategy):
    with s4.scope():
        total, step = counting()
    iterator = iter(s4.distribute_dataset([np.ones(4, np.float32)] * 6))
    for _ in range(3):
        assert s4.run_steps(step, iterator, 2) is None
    assert all(not token.is_deleted() for token, *_ in s4._runner._in_flight)
    assert float(total[...]) == 24.0


def test_sharded_optimizer_state_can_be_waited_for():
    strategy = dj.MirroredStrategy([0, 1, 2, 3], shard_optimizer_state=True)
    with strategy.scope():
        total, step = counting()
    for _ in range(3):
        strategy.run(step, args=(jnp.ones(4),))
    assert all(not token.is_deleted() for token, *_ in strategy._runner._in_flight)
    assert float(total[...]) == 3 * 4 * 4.0


def test_a_step_with_results_has_no_further_output(s4: dj.MirroredStrategy):
    """Its results can be waited for, so the program has the outputs of hand-written JAX."""
    with s4.scope():
        total, step = counting()

    def returning(x: jax.Array) -> jax.Array:
        step(x)
        return total[...] / 2

    assert float(s4.run(returning, args=(jnp.ones(4),))) == 8.0
    (program,) = s4._runner.cache.programs.values()
    assert len(program.compiled.out_tree.children()) == 2


@pytest.mark.exhaustive
def test_a_result_that_is_waited_for_is_not_kept_alive(s4: dj.MirroredStrategy):
    """A result that the user deletes is freed before the step runs again."""
    result = s4.run(lambda x: x * 2, args=(jnp.ones(4),))
    s4._runner._in_flight.clear()
    array = weakref.ref(result)
    del result
    gc.collect()
    assert array() is None
