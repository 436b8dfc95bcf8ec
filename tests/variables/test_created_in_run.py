"""Variables that a step creates in its first run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from leaves import replica_number

import distribute_jax as dj
from distribute_jax import VariableAggregation as Agg


class Plain:
    """A plain object that a step may put a variable on."""

    count: Any = None


class Module(nnx.Module):
    """A module that a step may put a variable on."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))


@pytest.mark.parametrize("make", [Plain, Module])
def test_a_variable_created_in_the_first_run_is_kept(strategy: dj.Strategy, make: Any):
    """It starts with the value of replica 0, counts from the first run on, and is mirrored."""
    with strategy.scope():
        owner = make()

    def step(x: jax.Array) -> jax.Array:
        if getattr(owner, "count", None) is None:
            owner.count = dj.Variable(replica_number() + x, aggregation=Agg.SUM)
        return owner.count.assign_add(1.0)

    n = strategy.num_replicas_in_sync
    assert float(strategy.run(step, args=(5.0,))) == 5.0 + n
    assert float(strategy.run(step, args=(9.0,))) == 5.0 + 2 * n
    assert [float(v) for v in owner.count.values] == [5.0 + 2 * n] * n
    owner.count.assign(1.0)
    assert float(strategy.run(step, args=(0.0,))) == 1.0 + n


@pytest.mark.parametrize("aggregation", list(Agg))
def test_an_on_read_variable_starts_with_the_value_of_replica_0(
    s4: dj.MirroredStrategy, aggregation: Agg
):
    """The initial value on replica r is r + 5: all start with 5; under SUM only replica 0 does."""
    owner = Plain()

    def step() -> None:
        if owner.count is None:
            owner.count = dj.Variable(
                replica_number() + 5,
                synchronization=dj.VariableSynchronization.ON_READ,
                aggregation=aggregation,
            )

    s4.run(step)
    expected = [5.0, 0.0, 0.0, 0.0] if aggregation is Agg.SUM else [5.0] * 4
    assert [float(v) for v in owner.count.values] == expected


def test_a_local_variable_of_a_step_is_not_state(s2: dj.MirroredStrategy):
    """It is created in each run."""

    def step() -> Any:
        local = dj.Variable(1.0)
        local.assign_add(2.0)
        return local[...]

    assert float(s2.run(step)) == float(s2.run(step)) == 3.0


def test_creating_it_in_each_run_is_refused(s2: dj.MirroredStrategy):
    """A step that creates its variable in each trace would lose it; the error says how to keep it."""
    owner = Plain()

    def step() -> Any:
        owner.count = dj.Variable(1.0, name="again")
        return owner.count[...]

    with pytest.raises(ValueError, match="variables again each time"):
        s2.run(step)


def test_other_variables_created_in_a_step_are_refused(s2: dj.MirroredStrategy):
    """Layers must be created before the step; the error names the attribute."""
    with s2.scope():
        module = Module()

    def step() -> Any:
        module.extra = nnx.Param(jnp.ones(2))
        return module.extra.sum()

    with pytest.raises(dj.StaleCaptureError, match="extra"):
        s2.run(step)
    assert not hasattr(module, "extra")
