"""``strategy.extended``: reductions to a device or variable, updates of variables, devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from leaves import replica_number

import distribute_jax as dj


def ids(strategy: dj.Strategy) -> Any:
    return strategy.run(replica_number)


def made(strategy: dj.Strategy, value: float = 1.0, **kinds: Any) -> dj.Variable:
    """Makes a variable under a strategy."""
    with strategy.scope():
        return dj.Variable(value, **kinds)


def test_batch_reduce_to_a_variable_and_to_a_device(s2: dj.MirroredStrategy):
    variable, own = made(s2), ids(s2)
    more = s2.run(lambda x: x + 1, args=(own,))
    sums = s2.extended.batch_reduce_to("sum", [(own, variable), (more, variable)])
    local = [[float(v) for v in s2.experimental_local_results(total)] for total in sums]
    assert local == [[1.0, 1.0], [3.0, 3.0]]
    assert all(total.sharding.is_fully_replicated for total in sums)
    means = s2.extended.batch_reduce_to("mean", [(own, "cpu:3"), (more, "/cpu:3")])
    assert [float(mean) for mean in means] == [0.5, 1.5]
    assert all(mean.devices() == {jax.devices()[3]} for mean in means)
    with pytest.raises(ValueError, match="tpu"):
        s2.extended.reduce_to("sum", own, "tpu:0")


def test_update_changes_every_replica(strategy: dj.Strategy):
    n = strategy.num_replicas_in_sync
    variable = made(strategy)
    grouped = strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(2.0,))
    assert grouped is variable
    assert [float(v) for v in strategy.experimental_local_results(variable)] == [3.0] * n
    single = strategy.extended.update(
        variable, lambda v, x: v.assign_add(x), kwargs={"x": 0.0}, group=False
    )
    assert [float(v) for v in single] == [3.0] * n
    assert type(single) is tuple


def test_update_refuses_per_replica_values(s2: dj.MirroredStrategy):
    variable = made(s2)
    with pytest.raises(ValueError, match="drift apart"):
        s2.extended.update(variable, lambda v, x: v.assign(x), args=(ids(s2),))
    with pytest.raises(ValueError, match=r"takes an nnx\.Variable or dj\.Variable; got float"):
        s2.extended.update(3.0, lambda v: v)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cross-replica context"):
        s2.run(lambda: s2.extended.update(variable, lambda v: v.assign(1.0)))


def test_reduce_to_and_update_in_merge_call(strategy: dj.Strategy):
    """The pattern of TensorFlow's optimizers."""
    n = strategy.num_replicas_in_sync
    variable = made(strategy, 10.0)

    def apply(current: Any, grad: Any, variable: dj.Variable) -> Any:
        total = current.extended.reduce_to("sum", grad, destinations=variable)
        return current.extended.update(
            variable, lambda v, g: v.assign_sub(0.5 * g), args=(total,)
        ).read_value()

    def step() -> Any:
        grad = dj.get_replica_context().replica_id_in_sync_group + 1.0
        return dj.get_replica_context().merge_call(apply, args=(grad, variable))

    result = strategy.run(step)
    wanted = 10.0 - 0.5 * n * (n + 1) / 2
    assert float(variable.numpy()) == wanted
    assert {float(v) for v in strategy.experimental_local_results(result)} == {wanted}


def test_variables_of_another_strategy_are_recognised(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy
):
    own, other = made(s2), made(s4)
    assert s2.extended.variable_created_in_scope(own)
    assert not s2.extended.variable_created_in_scope(other)
    with s2.extended.colocate_vars_with(own):
        assert dj.get_strategy() is s2
        assert s2.extended.variable_created_in_scope(nnx.Param(jnp.ones(2)))
    with pytest.raises(ValueError, match="another strategy"), s2.extended.colocate_vars_with(other):
        pass
    assert s2.extended.value_container(own) is own


def test_devices_of_workers_and_parameters():
    mirrored = dj.MirroredStrategy([0, 2])
    assert mirrored.extended.worker_devices == ("cpu:0", "cpu:2")
    assert mirrored.extended.parameter_devices == ("cpu:0", "cpu:2")
    central = dj.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:3")
    assert central.extended.worker_devices == ("cpu:0", "cpu:1")
    assert central.extended.parameter_devices == ("cpu:3",)
    assert mirrored.extended.experimental_require_static_shapes is True


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_and_local_results_of_variables(strategy: dj.Strategy, op: str):
    """An ON_READ variable counts with each replica's value, a mirrored one once for each replica."""
    n = strategy.num_replicas_in_sync
    kinds = {
        "synchronization": dj.VariableSynchronization.ON_READ,
        "aggregation": dj.VariableAggregation.SUM,
    }
    own, mirrored = made(strategy, 0.0, **kinds), made(strategy, 5.0)
    strategy.run(lambda: own.assign(dj.get_replica_context().replica_id_in_sync_group + 1.0))
    total = n * (n + 1) / 2
    assert float(strategy.reduce(op, own)) == (total if op == "sum" else total / n)
    assert float(strategy.reduce(op, mirrored)) == (5.0 * n if op == "sum" else 5.0)
    local = strategy.experimental_local_results(own)
    assert [float(v) for v in local] == [*range(1, n + 1)]


@pytest.mark.parametrize("destinations", [3, None, 1.5, ["cpu:0", "cpu:1"]])
def test_reduce_to_refuses_other_destinations(s2: dj.MirroredStrategy, destinations: Any):
    with pytest.raises(ValueError, match=r"destinations must be a variable or .* got"):
        s2.extended.reduce_to("sum", ids(s2), destinations)


def test_reduce_to_a_variable_is_stored_beside_it(s4: dj.MirroredStrategy):
    central = dj.CentralStorageStrategy([0, 1], parameter_device=5)
    total = central.extended.reduce_to("sum", ids(central), made(central))
    assert float(total) == 1.0
    assert total.devices() == {jax.devices()[5]}
    with pytest.raises(ValueError, match="another strategy"):
        central.extended.reduce_to("sum", ids(central), made(s4))


def test_several_values_are_reduced_by_one_program(s4: dj.MirroredStrategy):
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    shapes = [(3,), (2, 5), ()]
    grads = s4.run(lambda x: [x * jnp.ones(shape) for shape in shapes], args=(ids(s4),))
    variable = made(s4)
    compiled.clear()
    together = s4.extended.batch_reduce_to("mean", [(grad, variable) for grad in grads])
    assert len(compiled) == 1, compiled
    for total, grad in zip(together, grads, strict=True):
        assert jnp.array_equal(total, s4.reduce("mean", grad))
        assert total.sharding.is_fully_replicated
        assert len(total.devices()) == 4


def test_inside_update_the_strategy_is_current(s2: dj.MirroredStrategy):
    variable = made(s2)
    seen = []

    def look(v: dj.Variable) -> Any:
        strategy = dj.get_strategy()
        seen.append((strategy is s2, dj.has_strategy(), dj.in_cross_replica_context()))
        assert dj.get_replica_context() is None
        return v.assign_add(1.0)

    s2.extended.update(variable, look)
    call = lambda s: s.extended.update(variable, look)[...]  # noqa: E731
    s2.run(lambda: dj.get_replica_context().merge_call(call))
    assert set(seen) == {(True, True, True)}
    assert float(variable.numpy()) == 3.0
    assert not dj.has_strategy()
