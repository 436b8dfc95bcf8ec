"""CentralStorageStrategy: state on one device, the numbers of MirroredStrategy."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

CENTRE = jax.devices()[5]


@pytest.fixture(params=[4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 5))])
def central(request: pytest.FixtureRequest) -> dj.CentralStorageStrategy:
    """A strategy whose parameter device is not a compute device."""
    return dj.CentralStorageStrategy(list(range(request.param)), parameter_device=CENTRE)


class Net(nnx.Module):
    """Everything that a step can write: weights, statistics, draws, and a metric."""

    def __init__(self) -> None:
        # A bias before the norm has no gradient but rounding, which Adam would make large.
        self.first = nnx.Linear(6, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(16, axis_name="data", momentum=0.5, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.2, rngs=nnx.Rngs(dropout=1))
        self.second = nnx.Linear(16, 2, rngs=nnx.Rngs(2))
        self.seen = nnx.metrics.Average("rows")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def built(strategy: dj.Strategy) -> tuple[Net, nnx.Optimizer]:
    with strategy.scope():
        model = Net()
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def make_step(model: Net, optimizer: nnx.Optimizer) -> Any:
    def step(x: jax.Array, y: jax.Array):
        def loss_fn(model: Net):
            return dj.compute_average_loss(jnp.mean((model(x) - y) ** 2, axis=-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        replica = dj.get_replica_context()
        optimizer.update(model, replica.all_reduce("sum", grads))
        model.seen.update(rows=x[:, 0])
        return replica.all_reduce("sum", loss), model(x)

    return step


def batches(count: int, size: int = 20) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(size, 6)).astype("f"), rng.normal(size=(size, 2)).astype("f"))
        for _ in range(count)
    ]


def arrays(*trees: object) -> list[jax.Array]:
    return jax.tree.leaves([nnx.state(tree) for tree in trees])


def numbers(*trees: object) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in arrays(*trees)
    ]


def train(strategy: dj.Strategy, options: dj.RunOptions | None = None, steps: int = 1):
    """Trains on six batches; gives losses, all state as numbers, rows of the last step, the objects."""
    model, optimizer = built(strategy)
    step = make_step(model, optimizer)
    iterator = iter(strategy.distribute_dataset(batches(6)))
    losses: list[float] = []
    for _ in range(6 // steps):
        if steps == 1:
            loss, rows = strategy.run(step, args=next(iterator), options=options)
            losses.append(float(loss))
        else:
            loss, rows = strategy.run_steps(step, iterator, steps=steps, options=options)
            losses += loss.tolist()
    gathered = np.asarray(strategy.gather(rows, axis=0 if steps == 1 else 1))
    return losses, numbers(model, optimizer), gathered, (model, optimizer)


@functools.cache
def mirrored(replicas: int) -> Any:
    """What MirroredStrategy gives."""
    return train(dj.MirroredStrategy(list(range(replicas))))


def state_elsewhere(known: set[int], objects: Any) -> list[tuple[Any, Any]]:
    """Shape and dtype of new arrays that look like state and are on another device than they should be."""
    gc.collect()
    shapes = {(x.shape, x.dtype) for x in arrays(*objects)} - {((), np.dtype("int32"))}
    return [
        (x.shape, x.dtype)
        for x in jax.live_arrays()
        if id(x) not in known and x.devices() != {CENTRE} and (x.shape, x.dtype) in shapes
    ]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (None, 1),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in [
                (dj.RunOptions(donate_state=False), 3),
                (None, 3),
                (dj.RunOptions(donate_state=False), 1),
                (dj.RunOptions(lowering="pmap"), 1),
            ]
        ),
    ],
)
def test_the_numbers_are_those_of_mirrored_strategy_and_no_other_device_keeps_state(
    central: dj.CentralStorageStrategy, options: dj.RunOptions | None, steps: int
):
    """Weights, statistics, draws and metrics are the same, whatever the options.

    What a step sends is freed when it ends: every live array elsewhere belongs to someone else.
    """
    wanted = mirrored(central.num_replicas_in_sync)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    losses, state, rows, objects = train(central, options, steps)
    assert all(array.devices() == {CENTRE} for array in arrays(*objects))
    assert state_elsewhere(before, objects) == []
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-5)
    for a, b in zip(state, wanted[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rows if steps == 1 else rows[-1], wanted[2], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_state_that_was_sent_does_not_stay_on_the_parameter_device_either(
    central: dj.CentralStorageStrategy,
):
    """After a step there is one copy of the state in all: old values are freed unless kept on purpose."""
    model, optimizer = built(central)
    step = make_step(model, optimizer)
    (batch,) = central.distribute_dataset(batches(1))
    old = model.first.kernel.get_raw_value()
    central.run(step, args=batch, options=dj.RunOptions(donate_state=False))
    assert not old.is_deleted()
    old = model.first.kernel.get_raw_value()
    kept = dj.snapshot(model)
    wanted = np.asarray(old)
    central.run(step, args=batch)
    assert old.is_deleted()
    np.testing.assert_array_equal(kept["first"]["kernel"][...], wanted)
    assert kept["first"]["kernel"].get_raw_value().devices() == {CENTRE}


def test_an_array_that_was_donated_is_named(central: dj.CentralStorageStrategy):
    """Giving state away means here what it means under the other strategies."""
    with central.scope():
        weights = nnx.Param(jnp.ones(3))
    old = weights.get_raw_value()

    def step():
        weights[...] += 1.0

    central.run(step)
    with pytest.raises(dj.DonatedError, match=r"dj\.snapshot"):
        central.run(lambda x: x, args=(old,))


@pytest.mark.parametrize("parameter_device", [CENTRE, 0])
def test_arrays_that_two_variables_share_are_donated_once(parameter_device: Any):
    """Clones start from one array; each ends with its own value."""
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], parameter_device)
    with strategy.scope():
        first = nnx.Param(jnp.arange(3.0))
    second = nnx.clone(first)
    second.set_raw_value(first.get_raw_value())
    alone = nnx.Param(first.get_raw_value())

    def step():
        first[...] += 1.0
        second[...] += 2.0
        return alone.sum()

    assert [float(strategy.run(step)) for _ in range(2)] == [3.0, 3.0]
    assert first[...].tolist() == [2.0, 3.0, 4.0]
    assert second[...].tolist() == [4.0, 5.0, 6.0]


def test_the_scope_makes_state_on_the_parameter_device_and_warns_of_nothing(
    central: dj.CentralStorageStrategy,
):
    """Plain Flax code builds state where it stays; state made elsewhere is moved with one warning."""
    model, optimizer = built(central)
    assert all(array.devices() == {CENTRE} for array in arrays(model, optimizer))
    (batch,) = central.distribute_dataset(batches(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        central.run(make_step(model, optimizer), args=batch)
    outside = nnx.Param(jnp.ones(3))

    def grow():
        outside[...] += 1.0

    if central.num_replicas_in_sync > 1:
        with pytest.warns(
            UserWarning, match=r"outside of strategy\.scope\(\) and now are stored on"
        ):
            central.run(grow)
    else:
        central.run(grow)
    assert outside.get_raw_value().devices() == {CENTRE}


def test_everything_works_inside_the_scope(central: dj.CentralStorageStrategy):
    """Steps, input, reductions and gathering may stand in the scope, as TensorFlow code has them."""
    with central.scope():
        weights = nnx.Param(jnp.arange(3.0))

        def step(x: jax.Array):
            weights[...] += jax.lax.psum(x.sum(), "data")
            return x * 2, weights.sum()

        for x in central.distribute_dataset(
            [np.ones(20, "f"), np.ones(7, "f")], _options("shrink")
        ):
            rows, total = central.run(_masked(step), args=(x,))
        assert float(central.reduce("sum", rows, axis=0)) == 14.0
        assert central.gather(rows, axis=0).shape == (7,)
        assert float(total) == 3 + 3 * 27
        assert float(central.reduce("mean", total)) == float(total + 0)
        assert len(central.experimental_local_results(rows)) == central.num_replicas_in_sync
    assert weights[...].tolist() == [27.0, 28.0, 29.0]


def _options(partial: str) -> dj.InputOptions:
    return dj.InputOptions(partial=partial)


def _masked(step: Any) -> Any:
    return lambda x: step(jnp.where(dj.get_replica_context().batch_mask, x, 0))


def test_partial_batches_are_checked_for_leaks_and_state_is_put_back(
    central: dj.CentralStorageStrategy,
):
    """The check runs on copies of the central state; a leak leaves it as it was."""
    with central.scope():
        total = nnx.Param(jnp.zeros(()))

    def leaking(x: jax.Array):
        total[...] += jax.lax.psum(x.sum(), "data")

    if central.num_replicas_in_sync > 1:
        (x,) = central.distribute_dataset([np.ones(7, np.float32)])
        with pytest.raises(dj.PaddingLeakError, match="total"):
            central.run(leaking, args=(x,))
        assert float(total[...]) == 0.0
    for x in central.distribute_dataset([np.ones(7, np.float32)] * 2):
        central.run(_masked(leaking), args=(x,))
    assert float(total[...]) == 14.0


def test_verify_compares_with_one_device(central: dj.CentralStorageStrategy):
    """A right step passes, a wrong one is named, and state stays central."""
    with central.scope():
        model = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
    (batch,) = central.distribute_dataset(batches(1))

    def make(op: str) -> Any:
        def step(x: jax.Array, y: jax.Array):
            grads = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
            grads = dj.get_replica_context().all_reduce(op, grads)
            model.kernel[...] -= 0.1 * grads.kernel[...]

        return step

    central.run(make("mean"), args=batch, options=dj.RunOptions(verify="always"))
    assert model.kernel.get_raw_value().devices() == {CENTRE}
    if central.num_replicas_in_sync > 1:
        with pytest.raises(dj.NotEqualError, match="number of replicas"):
            central.run(make("sum"), args=batch, options=dj.RunOptions(verify="first"))


def test_parameters_passed_and_returned_are_central_too(central: dj.CentralStorageStrategy):
    """A nest of arrays, as of Linen: what comes back mirrored is stored on the parameter device."""
    with central.scope():
        params = {"w": jnp.ones((6, 2))}
    for x, y in central.distribute_dataset(batches(3)):

        def step(params: Any, x: jax.Array, y: jax.Array):
            grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
            grads = dj.get_replica_context().all_reduce("mean", grads)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        params = central.run(step, args=(params, x, y))
        assert isinstance(params["w"], dj.Mirrored)
        assert params["w"].devices() == {CENTRE}
    assert central._runner.programs() == 1
    # It mixes with arrays of any device, as the results of reduce do.
    assert np.isfinite(float((params["w"] + jax.device_put(1.0, jax.devices()[1])).sum()))


@pytest.mark.parametrize(
    "kind",
    [
        "pinned_host",
        *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("unpinned_host", "device")),
    ],
)
def test_state_may_be_in_another_memory_of_the_parameter_device(kind: str):
    """Variables stay in that memory; the numbers do not change."""
    if kind not in {memory.kind for memory in CENTRE.addressable_memories()}:
        pytest.skip(f"this JAX has no {kind} memory on {CENTRE.platform} devices")
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], CENTRE, memory_kind=kind)
    losses, state, _, objects = train(strategy)
    assert {x.sharding.memory_kind for x in arrays(*objects)} == {kind}
    wanted = mirrored(4)
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-5)
    for a, b in zip(state, wanted[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# Devices


def test_the_default_parameter_device_is_the_only_compute_device_or_the_cpu():
    """As in TensorFlow, with a host device where there are several compute devices."""
    assert dj.CentralStorageStrategy([3]).parameter_device == jax.devices()[3]
    assert dj.CentralStorageStrategy([2, 3]).parameter_device == jax.devices("cpu")[0]
    every = dj.CentralStorageStrategy()
    assert every.num_replicas_in_sync == len(jax.local_devices())
    assert dj.CentralStorageStrategy([]).mesh == every.mesh


@pytest.mark.exhaustive
def test_a_compute_device_may_be_the_parameter_device():
    """Then its own replica needs no copy, and the others hold none between steps."""
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], parameter_device="cpu:2")
    losses, _, _, objects = train(strategy)
    assert {d for x in arrays(*objects) for d in x.devices()} == {jax.devices()[2]}
    np.testing.assert_allclose(losses, mirrored(4)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compute_devices": ["cpu:9"]}, r"no local device 'cpu:9'.*'cpu:0'"),
        ({"compute_devices": [0, "cpu:0"]}, "more than once"),
        ({"parameter_device": "tpu:0"}, r"no local device 'tpu:0'.*'cpu:7'"),
        ({"parameter_device": 8}, r"no local device 8\."),
        ({"memory_kind": "disk"}, "memory_kind on .*'device'.*got 'disk'"),
    ],
)
def test_unknown_devices_and_memories_are_refused_with_those_there_are(
    arguments: dict[str, Any], text: str
):
    with pytest.raises(ValueError, match=text):
        dj.CentralStorageStrategy(**arguments)


def test_its_repr_says_where_parameters_are_and_a_deep_copy_works():
    """The copy keeps the devices, and compiles its own programs."""
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], parameter_device=5)
    compute = ", ".join(str(device) for device in jax.devices()[:4])
    assert repr(strategy) == f"CentralStorageStrategy([{compute}], {CENTRE})"
    again = copy.deepcopy(strategy)
    assert again is not strategy
    assert again.parameter_device == CENTRE
    np.testing.assert_allclose(train(again)[0], mirrored(4)[0], rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("aggregation", [dj.VariableAggregation.NONE, dj.VariableAggregation.SUM])
def test_a_variable_with_a_value_of_each_replica_keeps_them(
    central: dj.CentralStorageStrategy, aggregation: dj.VariableAggregation
):
    """ON_READ components are on the compute devices, and update and colocation take the variable."""
    with central.scope():
        own = dj.Variable(
            6.0, synchronization=dj.VariableSynchronization.ON_READ, aggregation=aggregation
        )
        stored = dj.Variable(1.0)
    extended = central.extended
    assert extended.variable_created_in_scope(own)
    assert extended.variable_created_in_scope(stored)
    with extended.colocate_vars_with(own):
        assert extended.variable_created_in_scope(dj.Variable(2.0))
    central.run(lambda: own.assign_add(1.0))
    if aggregation is not dj.VariableAggregation.NONE:
        assert float(extended.update(own, lambda v: v.assign(3.0)).numpy()) == 3.0
    other = dj.MirroredStrategy([6, 7])
    assert not other.extended.variable_created_in_scope(own)
    if central.num_replicas_in_sync > 1:
        with pytest.raises(ValueError, match="another strategy"):
            other.extended.update(own, lambda v: v.assign(3.0))
