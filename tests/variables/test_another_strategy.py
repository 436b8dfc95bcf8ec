"""A variable of one strategy in the scope of another can be read, but not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import distribute_jax as dj

SUM, ON_READ = dj.VariableAggregation.SUM, dj.VariableSynchronization.ON_READ
KINDS: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "own": {"synchronization": ON_READ, "aggregation": SUM},
}
WRITES: dict[str, Callable[[dj.Variable], Any]] = {
    "assign": lambda v: v.assign([3.0, 3.0]),
    "assign_add": lambda v: v.assign_add([3.0, 3.0]),
    "item": lambda v: v.__setitem__(1, 3.0),
    "all": lambda v: v.__setitem__(..., [3.0, 3.0]),
    "scatter": lambda v: v.scatter_add([0], [3.0]),
}


def create(strategy: dj.Strategy, kind: str) -> dj.Variable:
    """Makes the variable [1, 2] under a strategy."""
    with strategy.scope():
        return dj.Variable([1.0, 2.0], name="v", **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_variable_of_another_strategy_is_read(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy, kind: str
):
    """It computes with arrays of the current strategy, as in TensorFlow."""
    variable, mine = create(s4, kind), create(s2, kind)
    where = variable.get_raw_value().sharding
    with s2.scope():
        assert np.asarray(variable + mine[...]).tolist() == [2.0, 4.0]
        assert np.asarray(1 + variable).tolist() == [2.0, 3.0]
        assert float(variable[1] * mine[1]) == 4.0
        assert float(variable.sum()) == 3.0
        assert variable.numpy().tolist() == [1.0, 2.0]
    assert variable.get_raw_value().sharding is where, "reading moved it"


@pytest.mark.parametrize("write", WRITES)
def test_a_variable_of_another_strategy_is_not_written(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy, write: str
):
    """Every write raises an error that names it, and keeps its value; outside of the scope it is written."""
    variable = create(s4, "mirrored")
    with s2.scope(), pytest.raises(RuntimeError, match=r"Variable 'v' was written.*Mixing diff"):
        WRITES[write](variable)
    assert variable.numpy().tolist() == [1.0, 2.0]
    WRITES[write](variable)
    with s4.scope():
        WRITES[write](variable)
    assert variable.numpy().tolist() != [1.0, 2.0]


@pytest.mark.exhaustive
def test_a_variable_without_strategy_is_written(s4: dj.MirroredStrategy):
    """One created before any scope belongs to no strategy; components of other replicas do."""
    variable, components = dj.Variable(1.0, **KINDS["own"]), create(s4, "own")
    with dj.MirroredStrategy(jax.devices()[4:6]).scope():
        assert float(variable.assign(5.0).numpy()) == 5.0
        with pytest.raises(dj.MixedStrategiesError, match="reading it there is allowed"):
            components.assign([2.0, 2.0])
