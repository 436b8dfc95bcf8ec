"""Distributed datasets: where they may be made and iterated, and the numbers of their elements."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import distribute_jax as dj

BATCHES = [np.arange(8, dtype=np.float32), np.arange(6, dtype=np.float32)]


@pytest.mark.parametrize("advance", ["__next__", "get_next", "get_next_as_optional"])
def test_an_iterator_inside_run_is_a_value_error(s2: dj.MirroredStrategy, advance: str):
    """The message shows how to pass the element, and no batch is lost."""
    iterator = iter(s2.distribute_dataset(BATCHES))
    with pytest.raises(ValueError, match=r"next\(iterator\).*args=\(next\(iterator\),\)") as error:
        s2.run(lambda: getattr(iterator, advance)())
    assert isinstance(error.value, dj.ContextError)
    assert len(list(iterator)) == 2


def test_a_dataset_inside_run_or_a_trace_is_refused(s2: dj.MirroredStrategy):
    dataset = s2.distribute_dataset(BATCHES)
    with pytest.raises(dj.IterationError):
        s2.run(lambda: list(dataset))
    with pytest.raises(dj.ContextError, match="JAX is tracing"):
        jax.jit(lambda: list(dataset))()


def test_datasets_are_made_in_cross_replica_context(s2: dj.MirroredStrategy):
    makers = (s2.distribute_dataset, s2.distribute_datasets_from_function)
    for make in makers:
        with pytest.raises(dj.ContextError, match="on one replica"):
            s2.run(lambda make=make: make(lambda *_: BATCHES))
        with dj.OneDeviceStrategy("cpu:0").scope(), pytest.raises(dj.MixedStrategiesError):
            make(lambda *_: BATCHES)


@pytest.mark.parametrize("policy", ["auto", "off"])
def test_a_step_has_the_same_numbers_under_both_sharding_policies(
    strategy: dj.Strategy, policy: str
):
    dataset = strategy.distribute_dataset(BATCHES, dj.InputOptions(auto_shard_policy=policy))
    for batch, element in zip(BATCHES, dataset, strict=True):
        losses = strategy.run(lambda x: dj.compute_average_loss(x**2), args=(element,))
        loss = strategy.reduce("sum", losses, axis=None)
        assert float(loss) == pytest.approx(float((batch**2).mean()))
        gathered = strategy.gather(strategy.run(lambda x: 2 * x, args=(element,)), axis=0)
        np.testing.assert_array_equal(gathered, 2 * batch)


def test_the_experimental_name_is_the_same_method():
    methods = vars(dj.Strategy.__mro__[1])
    assert methods["experimental_distribute_dataset"] is methods["distribute_dataset"]
