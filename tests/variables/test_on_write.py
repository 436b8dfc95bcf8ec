"""Mirrored variables: the writes of several replicas are combined immediately."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import replica_number

import distribute_jax as dj
from distribute_jax import VariableAggregation as Agg


def create(strategy: dj.Strategy, value: Any = 10.0, **kinds: Any) -> dj.Variable:
    """Makes a variable under a strategy."""
    with strategy.scope():
        return dj.Variable(value, name="v", **kinds)


def test_different_writes_without_aggregation_are_refused(s2: dj.MirroredStrategy):
    """With aggregation NONE different writes are an error that names the variable."""
    variable = create(s2)

    def step() -> None:
        variable[...] = replica_number()

    with pytest.raises(dj.OutOfSyncError, match=r"variable \(Variable\) depends on axis_index"):
        s2.run(step)


def test_assigning_an_item_is_assign(strategy: dj.Strategy):
    """``v[...] = x`` and ``set_value`` inside run use the aggregation too."""
    n = strategy.num_replicas_in_sync
    variable = create(strategy, aggregation=Agg.SUM)

    def step() -> None:
        variable[...] = replica_number() + 1

    strategy.run(step)
    assert float(variable.numpy()) == n * (n + 1) / 2
    strategy.run(lambda: variable.set_value(jnp.float32(1)))
    assert float(variable.numpy()) == n


def test_a_per_replica_value_from_outside_is_refused(s2: dj.MirroredStrategy):
    """Assigned outside of run, it would make the replicas diverge, as in TensorFlow."""
    variable = create(s2, aggregation=Agg.MEAN)
    different = s2.run(replica_number)
    for write in (variable.assign, variable.assign_add, dj.Variable):
        with pytest.raises(ValueError, match=r"strategy\.reduce"):
            write(different)
    assert float(variable.numpy()) == 10.0


def test_shapes_dtypes_and_kinds_are_checked(s2: dj.MirroredStrategy):
    """A wrong shape, an integer MEAN, synchronization NONE and an unknown aggregation are ValueErrors."""
    variable = create(s2, jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*shape \(3,\)"):
        variable.assign(jnp.zeros(3))
    with pytest.raises(ValueError, match="shape"):
        s2.run(lambda: variable.assign(1.0))
    with pytest.raises(ValueError, match="mean of integers"):
        dj.Variable(1, aggregation=Agg.MEAN)
    with pytest.raises(ValueError, match="synchronization=NONE"):
        dj.Variable(1.0, synchronization=dj.VariableSynchronization.NONE)
    with pytest.raises(ValueError, match="VariableAggregation"):
        dj.Variable(1.0, aggregation="most")  # type: ignore[arg-type]


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_bools_are_assigned_but_not_added(s2: dj.MirroredStrategy, synchronization: str):
    """A sum of bools, and arithmetic with them, is refused in one line; an assignment keeps the dtype."""
    when = dj.VariableSynchronization[synchronization]
    with pytest.raises(ValueError, match=r"aggregation=SUM needs a numeric dtype; got bool"):
        create(s2, False, synchronization=when, aggregation=Agg.SUM)
    flag = create(s2, jnp.zeros(2, bool), synchronization=when, aggregation=Agg.ONLY_FIRST_REPLICA)
    yes = jnp.ones(2, bool)
    writes = [flag.assign_add, flag.assign_sub]
    if synchronization == "ON_WRITE":
        writes += [lambda rows: flag.scatter_mul(jnp.arange(2), rows)]
    for write in writes:
        for call in (lambda: write(yes), lambda: s2.run(write, args=(yes,))):  # noqa: B023
            with pytest.raises(ValueError, match=r"dtype bool, for which .* is not defined"):
                call()
    s2.run(flag.assign, args=(yes,))
    assert flag.numpy().tolist() == flag.assign(yes).numpy().tolist() == [True, True]
    assert flag.numpy().dtype == bool


@pytest.mark.parametrize("when", ["ON_WRITE", "ON_READ"])
def test_a_copy_of_a_variable_copies_its_array(strategy: dj.Strategy, when: str):
    """A step that writes the copy donates only the array of the copy."""
    kinds = {"synchronization": dj.VariableSynchronization[when], "aggregation": Agg.SUM}
    old = create(strategy, jnp.ones(3), **kinds)
    for new in (copy.copy(old), copy.deepcopy(old)):
        strategy.run(lambda new=new: new.assign_sub(jnp.ones(3)))
        assert float(new.numpy()[0]) == 1.0 - strategy.num_replicas_in_sync
        np.testing.assert_array_equal(old.numpy(), np.ones(3))


@pytest.mark.parametrize("spelling", ["variable", "array", "item"])
def test_an_assigned_value_is_a_copy(strategy: dj.Strategy, spelling: str):
    """The source may be donated to a later step."""
    online, target = create(strategy, jnp.ones(3)), create(strategy, jnp.zeros(3))
    step = lambda: online.assign_add(jnp.ones(3))  # noqa: E731
    strategy.run(step)
    if spelling == "item":
        target[...] = online
    else:
        target.assign(online if spelling == "variable" else online[...])
    strategy.run(step)
    np.testing.assert_array_equal(target.numpy(), np.full(3, 2.0))
    np.testing.assert_array_equal(online.numpy(), np.full(3, 3.0))


def test_names_and_metadata(s4: dj.MirroredStrategy):
    """The components of ``v`` are ``v``, ``v/replica_1``, …; trainable is True by default."""
    variable = create(s4)
    assert variable.name == "v"
    assert variable.component_names == ("v", "v/replica_1", "v/replica_2", "v/replica_3")
    assert variable.trainable is True
    assert len(variable.values) == 4
    assert len({next(iter(v.devices())) for v in variable.values}) == 4


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(Agg.MEAN, [0.0, -1.0, -1.0]), (Agg.SUM, [0.0, -2.0, -2.0])]
)
def test_scatter_sub_combines_dense_changes(
    s2: dj.MirroredStrategy, aggregation: Agg, expected: list[float]
):
    """Replica r subtracts r from row r and r + 1 from row r + 1."""
    variable = create(s2, jnp.zeros(3), aggregation=aggregation)

    def step() -> jax.Array:
        r = dj.get_replica_context().replica_id_in_sync_group
        return variable.scatter_sub(jnp.stack([r, r + 1]), jnp.stack([r, r + 1]))

    assert s2.run(step).tolist() == expected
    assert variable.numpy().tolist() == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("op", "start", "updates", "index", "expected"),
    [
        ("min", [0, 2, 0], 1, 1, [0, 1, 0]),
        ("max", [0, 0, 0], 1, 0, [1, 0, 0]),
        ("update", [0, 0, 0], 3, 1, [0, 3, 0]),
        ("mul", [5, 2, 3], 4, 2, [5, 2, 12]),
        ("div", [5, 2, 3], 2, 1, [5, 1, 3]),
    ],
)
@pytest.mark.parametrize("outside", [False, True])
def test_scatter_of_the_first_replica_and_from_outside(
    s2: dj.MirroredStrategy,
    op: str,
    start: list[float],
    updates: float,
    index: int,
    expected: list[float],
    outside: bool,
):
    """Under ONLY_FIRST_REPLICA only the changes of replica 0 count."""
    variable = create(s2, jnp.asarray(start, float), aggregation=Agg.ONLY_FIRST_REPLICA)

    def step() -> None:
        later = dj.get_replica_context().replica_id_in_sync_group * 7
        variable.scatter(op, jnp.array([index]), jnp.array([updates]) + later)

    if outside:
        variable.scatter(op, jnp.array([index]), jnp.array([updates]))
    else:
        s2.run(step)
    assert variable.numpy().tolist() == expected


def test_factors_are_combined_for_the_rows_that_any_replica_changes(s2: dj.MirroredStrategy):
    """scatter_mul under SUM multiplies a row by the sum of the replicas' factors."""
    variable = create(s2, jnp.array([1.0, 2.0, 3.0]), aggregation=Agg.SUM)

    def step() -> None:
        r = dj.get_replica_context().replica_id_in_sync_group
        variable.scatter_mul(jnp.stack([r]), jnp.stack([r + 2.0]))

    s2.run(step)
    assert variable.numpy().tolist() == [2.0, 6.0, 3.0]


@pytest.mark.parametrize("aggregation", [Agg.SUM, Agg.MEAN])
@pytest.mark.parametrize("op", ["min", "max", "update"])
def test_operations_that_cannot_be_combined_are_not_implemented(
    s2: dj.MirroredStrategy, aggregation: Agg, op: str
):
    """Such as a minimum under SUM, or a part that is assigned by index."""
    variable = create(s2, jnp.zeros(3), aggregation=aggregation)
    with pytest.raises(NotImplementedError, match=f"scatter_{op}"):
        s2.run(lambda: variable.scatter(op, jnp.array([0]), jnp.array([1.0])))

    def part() -> None:
        variable[0] = 1.0

    with pytest.raises(NotImplementedError, match="part"):
        s2.run(part)
    with pytest.raises(ValueError, match="op='no'"):
        variable.scatter("no", [0], [1.0])


def test_a_variable_trains_as_a_weight(strategy: dj.Strategy):
    """In a module it is differentiated and updated like any ``nnx.Variable``."""

    class Scale(nnx.Module):
        def __init__(self) -> None:
            self.factor = dj.Variable(2.0)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.factor[...]

    with strategy.scope():
        model = Scale()
    (batch,) = strategy.distribute_dataset([np.arange(8, dtype=np.float32)])

    def step(x: jax.Array) -> jax.Array:
        def loss(model: Scale) -> jax.Array:
            return dj.compute_average_loss(model(x))

        grads = nnx.grad(loss, argnums=nnx.DiffState(0, dj.Variable))(model)
        total = dj.get_replica_context().all_reduce("sum", grads["factor"][...])
        model.factor.assign_sub(total)
        return total

    assert float(strategy.run(step, args=(batch,))) == 3.5
    assert float(model.factor.numpy()) == -1.5


def test_metadata_is_part_of_the_program(s2: dj.MirroredStrategy):
    """A step with a SUM variable, and then with a MEAN variable, makes two programs."""
    results = []
    for aggregation in (Agg.SUM, Agg.MEAN):
        variable = create(s2, aggregation=aggregation)
        results.append(float(s2.run(lambda: variable.assign(replica_number() + 1))))  # noqa: B023
    assert results == [3.0, 1.5]


@pytest.mark.parametrize(
    ("start", "value", "given"),
    [
        (0, 3.7, "float64"),
        (0, jnp.float32(jnp.nan), "float32"),
        (jnp.uint8(0), 300, "int64"),
        (jnp.int8(0), jnp.int32(-129), "int32"),
        (0.0, 1j, "complex128"),
        (False, 1, "int64"),
        (0, 2**70, "object"),
    ],
)
def test_numbers_that_the_dtype_cannot_hold_are_refused(
    s2: dj.MirroredStrategy, start: Any, value: Any, given: str
):
    """Every write, inside run and outside, raises an error with both dtypes, and changes nothing."""
    variable = create(
        s2, jnp.zeros(1, jnp.asarray(start).dtype), aggregation=Agg.ONLY_FIRST_REPLICA
    )
    array = [value] if given == "object" else np.asarray([value])
    text = rf"dtype {variable.dtype} and was given {given}.*dj\.Variable\(0\.0\)"
    array = np.asarray(array)

    def item() -> None:
        variable[0] = value

    for write in (
        lambda: variable.assign(array),
        lambda: variable.assign_add(array),
        lambda: variable.scatter_update(jnp.array([0]), array),
        item,
    ):
        for call in (write, lambda: s2.run(write)):  # noqa: B023
            with pytest.raises(ValueError, match=text):
                call()
    assert not variable.numpy().any()


def test_traced_numbers_are_checked_by_their_dtype(s2: dj.MirroredStrategy):
    """Writing floats to integers or int32 to uint8 is refused when traced; integers to int32 are not."""
    small, count = create(s2, jnp.uint8(0)), create(s2, 0, aggregation=Agg.SUM)
    for variable in (small, count):
        with pytest.raises(ValueError, match="given float32"):
            s2.run(lambda: variable.assign(replica_number()))  # noqa: B023
    with pytest.raises(ValueError, match="uint8 and was given int32"):
        s2.run(lambda: small.assign(dj.get_replica_context().replica_id_in_sync_group))
    s2.run(lambda: count.assign_add(dj.get_replica_context().replica_id_in_sync_group + 1))
    assert int(count.numpy()) == 3
    two = lambda: jnp.where(jnp.isnan(count[...] * 1.0), 0, 2)  # noqa: E731
    with pytest.raises(ValueError, match="uint8 and was given int32"):
        s2.run(lambda: small.assign_add(two()))  # a size by chance: it could be 300 as well
    s2.run(lambda: small.assign_add(two().astype(jnp.uint8)))
    assert int(small.numpy()) == 2


def test_numbers_that_the_dtype_can_hold_are_written(s2: dj.MirroredStrategy):
    """Integers and bools to floats, bools to integers, and integers that fit to shorter ones."""
    real, small = create(s2), create(s2, jnp.uint8(0))
    for value in (3, True, np.arange(4)[3], jnp.int32(3), jnp.bfloat16(3)):
        assert float(real.assign(value).numpy()) == float(value)
    for value in (255, np.int64(255), jnp.int32(255), True):
        assert int(small.assign(value).numpy()) == int(value)
    assert real[...].dtype == jnp.float32
    assert small[...].dtype == jnp.uint8


def test_integers_are_divided_exactly(s2: dj.MirroredStrategy):
    """scatter_div rounds toward zero in the dtype of the variable, also above 2**24."""
    numbers = jnp.array([49, 2**24 + 1, -7, 5])
    by = jnp.array([49, 1, 2, 5])
    rows = jnp.arange(4)
    outside, inside = create(s2, numbers), create(s2, numbers, aggregation=Agg.SUM)

    def step() -> None:
        first = dj.get_replica_context().replica_id_in_sync_group == 0
        inside.scatter_div(rows, jnp.where(first, by, 0))

    s2.run(step)
    outside.scatter_div(rows, by)
    for variable in (outside, inside):
        assert variable.numpy().tolist() == [1, 2**24 + 1, -3, 1]
        assert variable[...].dtype == jnp.int32


@pytest.mark.parametrize(("op", "expected"), [("mul", [72.0, 12.0]), ("div", [2.0, 12.0])])
def test_factors_for_one_row_are_multiplied(strategy: dj.Strategy, op: str, expected: list[float]):
    """2 and 3 for row 0 make 6, outside of run and for one replica."""
    rows, by = jnp.array([0, 0]), jnp.array([2.0, 3.0])
    outside = create(strategy, jnp.array([12.0, 12.0]))
    inside = create(strategy, jnp.array([12.0, 12.0]), aggregation=Agg.SUM)

    def step() -> None:
        inside.scatter(op, rows, by * (replica_number() == 0))

    outside.scatter(op, rows, by)
    strategy.run(step)
    assert outside.numpy().tolist() == inside.numpy().tolist() == expected


def test_after_each_step_all_replicas_have_the_same_bits(s2: dj.MirroredStrategy):
    """Ten training steps; a counter of steps increases by one, not two."""
    counter = create(s2, 0, aggregation=Agg.ONLY_FIRST_REPLICA)
    with s2.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.adam(0.1))

    def step(x: jax.Array) -> None:
        optimizer.update(
            model, nnx.grad(lambda model: dj.compute_average_loss((model(x)[:, 0] - 1) ** 2))(model)
        )
        counter.assign_add(1)

    batches = np.random.default_rng(0).normal(size=(10, 8, 3)).astype(np.float32)
    for done, batch in enumerate(s2.distribute_dataset(list(batches)), 1):
        s2.run(step, args=(batch,))
        copies = [[shard.data for shard in v.addressable_shards] for v in weights(model)]
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in copies)
        assert int(counter.numpy()) == done
        assert [int(v) for v in counter.values] == [done] * 2


def weights(model: nnx.Linear) -> list[jax.Array]:
    """The arrays of the parameters."""
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def test_a_variable_takes_the_arguments_of_tensorflow():
    """``initial_value``, also a function, and ``dtype``; ``bool`` is that of the value."""
    assert [bool(dj.Variable(value)) for value in (True, 0)] == [True, False]
    v = dj.Variable(initial_value=lambda: 0, name="n", dtype=jnp.float32)
    assert (v.read_value().dtype, float(v.numpy())) == (jnp.float32, 0.0)
    for wrong in (dj.Variable, lambda: dj.Variable(1, initial_value=2)):
        with pytest.raises(TypeError, match=r"takes one initial value: .*initial_value=0\.0"):
            wrong()
    with pytest.raises(ValueError, match="would be changed"):
        dj.Variable(0.5, dtype=jnp.int32)
