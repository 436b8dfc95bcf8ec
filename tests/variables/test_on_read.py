"""ON_READ variables: each replica keeps a local value until it is read outside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from leaves import replica_number

import distribute_jax as dj
from distribute_jax import VariableAggregation as Agg

ON_READ = dj.VariableSynchronization.ON_READ
SUM = dj.VariableAggregation.SUM


def create(strategy: dj.Strategy, aggregation: Agg, value: Any = 10.0) -> dj.Variable:
    """Makes an ON_READ variable under a strategy."""
    with strategy.scope():
        return dj.Variable(value, synchronization=ON_READ, aggregation=aggregation, name="v")


def test_an_assigned_sum_is_divided(s2: dj.MirroredStrategy):
    """Under SUM each replica gets its share, and the first the remainder: 5 is 3 and 2."""
    whole, real = create(s2, Agg.SUM, 1), create(s2, Agg.SUM, 1.0)
    assert [int(v) for v in whole.values] == [1, 0]
    whole.assign(5)
    real.assign(7.0)
    assert [int(v) for v in whole.values] == [3, 2]
    assert [float(v) for v in real.values] == [3.5, 3.5]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "complex64"])
def test_every_assigned_sum_reads_back_exactly(strategy: dj.Strategy, dtype: str):
    """Fractions, the largest and the smallest numbers, infinity and NaN."""
    numbers = [0, 1, -5, 7, 127]
    if dtype != "int32":
        numbers += [0.1, 1 / 3, -2.7, 1e-3, np.inf, -np.inf, np.nan]
        numbers += [float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)]
    value = jnp.asarray(np.array(numbers), dtype)
    variable = create(strategy, Agg.SUM, jnp.zeros_like(value))
    variable.assign(value)
    read, expected = variable.numpy().astype(complex), np.asarray(value).astype(complex)
    np.testing.assert_array_equal(read, expected)
    (one,) = [v[3].item() for v in variable.values[-1:]]
    n = strategy.num_replicas_in_sync
    assert one == {"int32": 7 // n, "complex64": 7 if n == 1 else 0}.get(dtype, 7 / n)


def test_without_aggregation_it_has_no_value_outside_run(s2: dj.MirroredStrategy):
    """Reading or assigning NONE from outside is a ValueError; its components can be read."""
    variable = create(s2, Agg.NONE)
    s2.run(lambda: variable.assign(replica_number()))
    for use in (variable.read_value, variable.numpy, lambda: variable + 1):
        with pytest.raises(ValueError, match="aggregation=NONE"):
            use()
    with pytest.raises(ValueError, match="aggregation=NONE"):
        variable.assign(1.0)
    assert [float(v) for v in variable.values] == [0.0, 1.0]


def test_shape_and_repr_are_those_of_the_aggregate(s4: dj.MirroredStrategy):
    """Outside, the components do not show in shape, arithmetic or repr."""
    variable = create(s4, Agg.SUM, jnp.arange(3.0))
    assert variable.shape == (3,)
    assert variable.size == 3
    assert (variable + 1).tolist() == [1.0, 2.0, 3.0]
    assert float(variable.sum()) == 3.0
    assert "0., 1., 2." in repr(variable)
    assert variable.trainable is False


def test_weights_that_depend_on_it_are_refused(s2: dj.MirroredStrategy):
    """The message names the variable."""
    variable = create(s2, Agg.SUM)
    with s2.scope():
        weight = nnx.Param(jnp.zeros(()))

    def step() -> None:
        weight[...] = weight[...] + variable[...]

    with pytest.raises(dj.OutOfSyncError, match="variable, of which each replica has its own"):
        s2.run(step)


def test_a_write_neither_communicates_nor_allocates(s4: dj.MirroredStrategy):
    """A write inside run compiles to no collective, and reuses the memory of the old components."""
    variable = create(s4, Agg.SUM, jnp.zeros(1000))

    def step() -> None:
        variable.assign_add(jnp.ones(1000))

    def where() -> int:
        return variable.get_raw_value().addressable_data(0).unsafe_buffer_pointer()

    s4.run(step)  # what the first step is given may still be in use where it was created
    before = where()
    s4.run(step)
    assert where() == before
    (program,) = s4._runner.cache.programs.values()
    assert "all-reduce" not in program.compiled.as_text()
    assert float(variable.numpy()[0]) == 8.0
    assert variable.get_raw_value().addressable_shards[0].data.shape == (1, 1000)


def test_it_can_be_moved_to_another_number_of_replicas(strategy: dj.Strategy):
    """Created outside of a scope, or moved from three replicas as the error says, it reads the same."""
    three = dj.MirroredStrategy([0, 1, 2])
    outside = dj.Variable(10.0, synchronization=ON_READ, aggregation=Agg.SUM)
    moved = nnx.List([create(three, Agg.SUM)])
    three.run(lambda: moved[0].assign(replica_number()))
    with pytest.raises(
        dj.MixedStrategiesError, match=r"cpu:2\]\n.*nnx\.update\(model, jax\.device_put"
    ):
        strategy.run(lambda: moved[0].assign_add(1.0))
    sharding = NamedSharding(strategy.mesh, PartitionSpec())
    nnx.update(moved, jax.device_put(nnx.state(moved), sharding))
    for variable, before in ((outside, 10.0), (moved[0], 3.0)):
        assert float(variable.numpy()) == before
        strategy.run(lambda: variable.assign_add(1.0))  # noqa: B023
        assert len(variable.values) == strategy.num_replicas_in_sync
        assert float(variable.numpy()) == before + strategy.num_replicas_in_sync


def test_reads_and_assignments_in_merge_call_are_as_outside(strategy: dj.Strategy):
    """merge_call is cross-replica context: the aggregate is read, and an assigned sum is divided."""
    n = strategy.num_replicas_in_sync
    variable = create(strategy, Agg.SUM, 0)

    def merge(_: Any) -> jax.Array:
        total = variable.read_value()
        variable.assign(total + 5)
        return total

    def step() -> jax.Array:
        variable.assign(dj.get_replica_context().replica_id_in_sync_group)
        return dj.get_replica_context().merge_call(merge)

    assert int(strategy.run(step)) == n * (n - 1) // 2
    assert int(variable.numpy()) == n * (n - 1) // 2 + 5
    assert np.ptp([int(v) for v in variable.values]) <= n


@pytest.mark.parametrize("wrong", [False, True])
def test_verify_compares_the_aggregate(s4: dj.MirroredStrategy, wrong: bool):
    """A count of examples equals that of one device, unless it is multiplied by the number of replicas."""
    variable, free = create(s4, Agg.SUM, 1.0), create(s4, Agg.NONE, 1.0)
    (batch,) = s4.distribute_dataset([np.ones((8, 2), np.float32)])

    def step(x: jax.Array) -> None:
        times = dj.get_replica_context().num_replicas_in_sync if wrong else 1
        variable.assign_add(x[:, 0].sum() * times)
        free.assign_add(1.0)

    if wrong:
        with pytest.raises(dj.NotEqualError, match=r"variable.*4\.000"):
            dj.testing.check_equals_one_device(s4, step, (batch,))
    else:
        dj.testing.check_equals_one_device(s4, step, (batch,))
    assert float(variable.numpy()) == (1.0 if wrong else 9.0)  # the step itself ran after the check
    assert [float(v) for v in free.values] == [1.0 if wrong else 2.0] * 4


def test_numpy_reads_the_aggregate(s2: dj.MirroredStrategy):
    """NumPy and comparisons get the result of ``numpy()``, in the requested dtype; with NONE an error."""
    variable = create(s2, Agg.SUM, jnp.zeros(2))
    s2.run(lambda: variable.assign_add(jnp.ones(2)))
    assert np.asarray(variable).tolist() == [2.0, 2.0]
    assert np.allclose(variable, [2.0, 2.0])
    compared = [variable > 2.0, variable >= 2.0, variable < variable, variable <= jnp.ones(2)]
    assert [bool(each.all()) for each in compared] == [False, True, False, False]
    assert np.asarray(variable, np.int32).dtype == np.int32
    own = np.array(variable)
    own[0] = 7.0
    assert variable.numpy().tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="aggregation=NONE"):
        np.asarray(create(s2, Agg.NONE))


def test_reductions_in_merge_call_are_as_outside(s4: dj.MirroredStrategy):
    """reduce, reduce_to and the local results use all components there, not those of one replica."""
    variable = create(s4, Agg.MEAN, 0.0)

    def merge(s: dj.Strategy) -> Any:
        total = s.extended.reduce_to("sum", variable, destinations=variable)
        return s.reduce("mean", variable), total, s.experimental_local_results(variable)[3]

    def step() -> Any:
        variable.assign(replica_number() + 1)
        return dj.get_replica_context().merge_call(merge)

    assert [float(x) for x in s4.run(step)] == [2.5, 10.0, 4.0]
    assert float(s4.reduce("mean", variable)) == 2.5


@pytest.mark.parametrize("value", [True, jnp.uint8(3), jnp.float16(0.5)])
def test_a_constant_can_be_written(s2: dj.MirroredStrategy, value: Any):
    """Each replica gets it, in the dtype of the variable."""
    variable = create(s2, Agg.ONLY_FIRST_REPLICA, jnp.zeros_like(value))
    s2.run(lambda: variable.assign(value))
    assert variable[...].dtype == jnp.asarray(value).dtype
    assert [v.item() for v in variable.values] == [jnp.asarray(value).item()] * 2


@pytest.mark.exhaustive
def test_a_returned_variable_has_the_components_of_all_replicas(s4: dj.MirroredStrategy):
    """A variable in a returned state can be read, shown, reduced and used in steps."""
    with s4.scope():
        model = nnx.List([dj.Variable(0.0, synchronization=ON_READ, aggregation=Agg.SUM)])

    def step() -> Any:
        state = nnx.state(model)
        return jax.tree.map(lambda x: x + replica_number(), state), jax.tree.map(
            lambda x: x + 1, state
        )

    def constant() -> Any:
        return jax.tree.map(lambda x: jnp.ones(()), nnx.state(model))

    (different, more), same = s4.run(step), s4.run(constant)
    for state, components in (
        (different, [0.0, 1.0, 2.0, 3.0]),
        (more, [1.0] * 4),
        (same, [1.0] * 4),
    ):
        variable = state[0]
        s4.run(lambda: variable.assign_add(0.0))  # noqa: B023
        assert [float(v) for v in variable.values] == components
        assert float(variable.numpy()) == sum(components) == float(s4.reduce("sum", variable))
        assert f"{sum(components)}" in repr(state).replace("6.", "6.0").replace("4.", "4.0")
        s4.run(lambda: variable.assign_add(1.0))  # noqa: B023
        assert float(variable.numpy()) == sum(components) + 4
        variable.assign(8.0)
        assert float(variable.numpy()) == 8.0


@pytest.mark.exhaustive
def test_reads_are_correct_after_a_write_under_the_users_jit(strategy: dj.Strategy):
    """XLA may place the components on one device or replicate them; every way to read works."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = dj.Variable(jnp.zeros(2), synchronization=ON_READ, aggregation=SUM, name="v")

    @nnx.jit
    def assigned(v: dj.Variable, x: Any) -> None:
        v.assign(x)

    @nnx.jit
    def doubled(v: dj.Variable) -> None:
        v[...] = v[...] * 2

    for write, total in (
        (lambda: assigned(v, jnp.array([n, 2.0 * n])), 1.0),
        (lambda: doubled(v), 2.0),
    ):
        write()
        expected = [[total, 2 * total]] * n
        assert v.numpy().tolist() == [total * n, 2 * total * n]
        assert [x.tolist() for x in v.values] == expected
        assert [x.tolist() for x in strategy.experimental_local_results(v)] == expected
        assert len(v.component_names) == n
        assert strategy.reduce("sum", v, axis=None).tolist() == [total * n, 2 * total * n]
        assert strategy.gather(v, axis=0).tolist() == [x for row in expected for x in row]
    strategy.run(lambda: v.assign_add(jnp.ones(2)))
    assert v.numpy().tolist() == [3.0 * n, 5.0 * n]
