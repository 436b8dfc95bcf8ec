"""``CentralStorageStrategy``: state on one device, with the numbers of ``MirroredStrategy``."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_close, numbers

import distribute_jax as dj

CENTRE = jax.devices()[5]


@pytest.fixture(params=[4, *(long(n) for n in (1, 2, 5))])
def central(request: pytest.FixtureRequest) -> dj.CentralStorageStrategy:
    """A strategy whose parameter device is not a compute device."""
    return dj.CentralStorageStrategy(list(range(request.param)), parameter_device=CENTRE)


class Net(nnx.Module):
    """A model with weights, batch statistics, random streams and a metric."""

    def __init__(self) -> None:
        self.first = nnx.Linear(6, 256, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(256, axis_name="data", momentum=0.5, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.2, rngs=nnx.Rngs(dropout=1))
        self.second = nnx.Linear(256, 2, rngs=nnx.Rngs(2))
        self.seen = nnx.metrics.Average("rows")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def built(strategy: dj.Strategy) -> tuple[Net, nnx.Optimizer]:
    with strategy.scope():
        model = Net()
        return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


def make_step(model: Net, optimizer: nnx.Optimizer) -> Any:
    def step(x: jax.Array, y: jax.Array):
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(jnp.mean((model(x) - y) ** 2, axis=-1))
        )(model)
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


def train(strategy: dj.Strategy, options: dj.RunOptions | None = None, steps: int = 1):
    """Trains on six batches; returns losses, state as numbers, the rows of the last step, and the objects."""
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
    return losses, numbers(arrays(model, optimizer)), gathered, (model, optimizer)


@functools.cache
def mirrored(replicas: int) -> Any:
    return train(dj.MirroredStrategy(list(range(replicas))))


def find_state_elsewhere(known: set[int], objects: Any) -> list[tuple[Any, Any]]:
    """Returns shape and dtype of new arrays that look like state and are not on the parameter device."""
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
        long(dj.RunOptions(donate_state=False), 3),
        long(None, 3),
        long(dj.RunOptions(donate_state=False), 1),
        long(dj.RunOptions(lowering="pmap"), 1),
    ],
)
def test_training_equals_mirrored_and_leaves_no_state_on_other_devices(
    central: dj.CentralStorageStrategy, options: dj.RunOptions | None, steps: int
):
    wanted = mirrored(central.num_replicas_in_sync)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    losses, state, rows, objects = train(central, options, steps)
    assert all(array.devices() == {CENTRE} for array in arrays(*objects))
    assert find_state_elsewhere(before, objects) == []
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-5)
    assert_close(state, wanted[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rows if steps == 1 else rows[-1], wanted[2], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_old_state_is_freed_unless_it_was_kept(central: dj.CentralStorageStrategy):
    """What is referred to stays readable where it is; without references its memory is free at once."""
    model, optimizer = built(central)
    step = make_step(model, optimizer)
    (batch,) = central.distribute_dataset(batches(1))
    central.run(step, args=batch)
    old = model.first.kernel.get_raw_value()
    wanted = np.asarray(old).copy()
    freed = weakref.ref(model.second.kernel.get_raw_value())
    central.run(step, args=batch)
    gc.collect()
    assert freed() is None
    np.testing.assert_array_equal(old, wanted)
    assert old.devices() == {CENTRE}
    assert float(central.run(lambda x: x.sum(), args=(old,))) == pytest.approx(wanted.sum())


@pytest.mark.parametrize("parameter_device", [CENTRE, 0])
def test_an_array_that_two_variables_share_is_donated_once(parameter_device: Any):
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


@pytest.mark.exhaustive
def test_the_scope_makes_state_on_the_parameter_device(central: dj.CentralStorageStrategy):
    """State that was made outside is moved with one warning."""
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


def test_steps_input_and_reductions_inside_the_scope(central: dj.CentralStorageStrategy):
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


def test_a_padding_leak_raises_and_restores_state(central: dj.CentralStorageStrategy):
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


@pytest.mark.exhaustive
def test_verify_compares_with_one_device(central: dj.CentralStorageStrategy):
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


def test_parameters_that_are_passed_and_returned_are_stored_centrally(
    central: dj.CentralStorageStrategy,
):
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


@pytest.mark.parametrize("kind", ["pinned_host", *(long(k) for k in ("unpinned_host", "device"))])
def test_large_arrays_may_be_in_another_memory_of_the_parameter_device(kind: str):
    if kind not in {memory.kind for memory in CENTRE.addressable_memories()}:
        pytest.skip(f"this JAX has no {kind} memory on {CENTRE.platform} devices")
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], CENTRE, memory_kind=kind)
    losses, state, _, objects = train(strategy)
    assert {x.sharding.memory_kind for x in arrays(*objects) if x.size >= 1024} == {kind}
    default = CENTRE.default_memory().kind  # small ones can be computed with
    assert {x.sharding.memory_kind for x in arrays(*objects) if x.size < 1024} == {default}
    np.testing.assert_allclose(losses, mirrored(4)[0], rtol=1e-5)
    assert_close(state, mirrored(4)[1], rtol=1e-4, atol=1e-6)


# Devices


def test_the_default_parameter_device_is_the_only_compute_device_or_the_cpu():
    assert dj.CentralStorageStrategy([3]).parameter_device == jax.devices()[3]
    assert dj.CentralStorageStrategy([2, 3]).parameter_device == jax.devices("cpu")[0]
    every = dj.CentralStorageStrategy()
    assert every.num_replicas_in_sync == len(jax.local_devices())
    assert dj.CentralStorageStrategy([]).mesh == every.mesh


@pytest.mark.exhaustive
def test_a_compute_device_may_be_the_parameter_device():
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], parameter_device="cpu:2")
    losses, _, _, objects = train(strategy)
    assert {d for x in arrays(*objects) for d in x.devices()} == {jax.devices()[2]}
    np.testing.assert_allclose(losses, mirrored(4)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compute_devices": ["cpu:9"]}, r"no local device 'cpu:9'.*'cpu:0'"),
        ({"compute_devices": [0, "cpu:0"]}, "same device"),
        ({"parameter_device": "tpu:0"}, r"no local device 'tpu:0'.*'cpu:7'"),
        ({"parameter_device": 8}, r"no local device 8\."),
        ({"memory_kind": "disk"}, "memory_kind on .*'device'.*got 'disk'"),
    ],
)
def test_unknown_devices_and_memories_are_refused(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        dj.CentralStorageStrategy(**arguments)


def test_repr_and_deep_copy():
    strategy = dj.CentralStorageStrategy([0, 1, 2, 3], parameter_device=5)
    compute = ", ".join(str(device) for device in jax.devices()[:4])
    assert repr(strategy) == f"CentralStorageStrategy([{compute}], {CENTRE})"
    again = copy.deepcopy(strategy)
    assert again is not strategy
    assert again.parameter_device == CENTRE
    np.testing.assert_allclose(train(again)[0], mirrored(4)[0], rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("aggregation", [dj.VariableAggregation.NONE, dj.VariableAggregation.SUM])
def test_on_read_variables_are_on_the_compute_devices(
    central: dj.CentralStorageStrategy, aggregation: dj.VariableAggregation
):
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
