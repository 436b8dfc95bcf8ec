"""Users say how the replicas' values of their own types of variable become one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax import VariableAggregation as Agg
from distribute_jax.program.binding._aggregation import BY_TYPE


class Summed(nnx.Variable[Any]):
    """What replicas add to it is summed."""


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
    """From 10, replica r adds r + 1: the additions are summed, averaged, or the first one counts."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        state = kind(jnp.float32(10))

    def step() -> None:
        state[...] += dj.get_replica_context().replica_id_in_sync_group + 1

    strategy.run(step)
    wanted = {Summed: n * (n + 1) / 2, Averaged: (n + 1) / 2, First: 1.0, OfFirst: 1.0}
    assert float(state[...]) == 10 + wanted[kind]
    assert len({float(shard.data) for shard in state[...].addressable_shards}) == 1


def test_what_is_no_type_or_no_aggregation_is_refused():
    """The error says what it takes."""
    for kind, aggregation in ((int, Agg.SUM), (Summed, "sum"), (Summed(1.0), Agg.SUM)):
        with pytest.raises(ValueError, match=r"subclass of nnx\.Variable"):
            dj.register_aggregation(kind, aggregation)  # type: ignore[arg-type]


def test_a_dj_variable_keeps_its_own_rule(s2: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch):
    """It combines its writes itself: a rule for it is refused, one for its base does not count twice."""

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
