"""Users register how the replicas' values of their own variable types are combined."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax import VariableAggregation as Agg
from distribute_jax.program._aggregation import BY_TYPE


class Summed(nnx.Variable[Any]):
    """The additions of the replicas are summed."""


class Averaged(nnx.Variable[Any]):
    """The replicas' values are averaged."""


class First(nnx.Variable[Any]):
    """Replica 0 decides."""


class OfFirst(First):
    """Follows its base class."""


RULES = {Summed: Agg.SUM, Averaged: Agg.MEAN, First: Agg.ONLY_FIRST_REPLICA}
for kind, aggregation in RULES.items():
    dj.register_aggregation(kind, aggregation)


@pytest.mark.parametrize("kind", [Summed, Averaged, First, OfFirst])
def test_a_registered_type_follows_its_rule(strategy: dj.Strategy, kind: Any):
    """Replica r adds r + 1 to 10: additions are summed, averaged, or that of replica 0 counts."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        state = kind(jnp.float32(10))

    def step() -> None:
        state[...] += dj.get_replica_context().replica_id_in_sync_group + 1

    strategy.run(step)
    expected = {Summed: n * (n + 1) / 2, Averaged: (n + 1) / 2, First: 1.0, OfFirst: 1.0}
    assert float(state[...]) == 10 + expected[kind]
    assert len({float(shard.data) for shard in state[...].addressable_shards}) == 1


def test_invalid_types_and_aggregations_are_refused():
    """The error says what is accepted."""
    for kind, aggregation in ((int, Agg.SUM), (Summed, "sum"), (Summed(1.0), Agg.SUM)):
        with pytest.raises(ValueError, match=r"subclass of nnx\.Variable"):
            dj.register_aggregation(kind, aggregation)  # type: ignore[arg-type]


def test_a_dj_variable_keeps_its_rule(s2: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch):
    """It combines its writes itself: a rule for it is refused, one for its base class is not applied."""

    class Own(dj.Variable):
        pass

    for kind in (dj.Variable, Own):
        with pytest.raises(ValueError, match=rf"{kind.__name__}.*own aggregation"):
            dj.register_aggregation(kind, Agg.SUM)
    monkeypatch.setitem(BY_TYPE, nnx.Variable, BY_TYPE[nnx.Variable])  # put back after the test
    dj.register_aggregation(nnx.Variable, Agg.SUM)
    with s2.scope():
        total = Own(0.0, aggregation=Agg.SUM)
    s2.run(lambda: total.assign_add(1.0))
    assert float(total.numpy()) == 2.0


def test_the_first_replica_decides_on_random_keys_and_bools(s4: dj.MirroredStrategy):
    """The value of replica 0 is used for every kind of value."""
    with s4.scope():
        key, flag = First(jax.random.key(0)), First(jnp.array(False))
        assigned = dj.Variable(jax.random.key(0), aggregation=Agg.ONLY_FIRST_REPLICA)

    def step() -> None:
        replica = dj.get_replica_context().replica_id_in_sync_group
        key[...] = jax.random.fold_in(key[...], replica + 5)
        flag[...] = replica == 0
        assigned.assign(jax.random.fold_in(assigned[...], replica + 5))

    s4.run(step)
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 5)).tolist()
    assert jax.random.key_data(key[...]).tolist() == expected
    assert jax.random.key_data(assigned[...]).tolist() == expected
    assert (flag[...].dtype, bool(flag[...])) == (jnp.bool_, True)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_mean_of_narrow_numbers_is_exact_and_keeps_the_dtype(s4: dj.MirroredStrategy, dtype: Any):
    """The sum of four such values exceeds the range of float16 and the precision of bfloat16."""
    values = jnp.array([40000, 33024, 32768, 32768], jnp.float32).astype(dtype)
    with s4.scope():
        mean, statistic = Averaged(jnp.zeros((), dtype)), nnx.BatchStat(jnp.zeros((), dtype))

    def step() -> None:
        mean[...] = statistic[...] = values[dj.get_replica_context().replica_id_in_sync_group]

    s4.run(step)
    expected = values.astype(jnp.float32).mean().astype(dtype)
    assert mean[...].dtype == statistic[...].dtype == dtype
    assert float(mean[...]) == float(statistic[...]) == float(expected)


@pytest.mark.parametrize("kind", [Averaged, nnx.BatchStat])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_a_mean_of_integers_is_refused_by_name(s4: dj.MirroredStrategy, kind: Any, dtype: Any):
    """It would change the dtype; values that are equal on every replica are kept."""
    with s4.scope():
        state = kind(jnp.zeros((), dtype))

    def step(x: Any) -> None:
        state[...] = (state[...] + x).astype(dtype)

    own = s4.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    with pytest.raises(
        dj.ArgumentError, match=rf"state \({kind.__name__}, {dtype.dtype}\): .*mean"
    ):
        s4.run(step, args=(own,))
    s4.run(step, args=(1,))
    assert (state[...].dtype, int(state[...])) == (dtype, 1)


def test_a_sum_of_bools_is_refused_by_name(s4: dj.MirroredStrategy):
    """State of a metric is summed; the message says what to use instead."""
    with s4.scope():
        state = nnx.metrics.MetricState(jnp.array(False))

    def step() -> None:
        replica = dj.get_replica_context().replica_id_in_sync_group
        state[...] = (state[...].astype(jnp.int32) + replica).astype(bool)

    with pytest.raises(
        dj.ArgumentError, match=r"state \(MetricState, bool\): .* is the sum.*count"
    ):
        s4.run(step)
