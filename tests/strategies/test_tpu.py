"""``TPUStrategy``: replicas of one and of several cores, on simulated devices."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from leaves import assert_close, sum_on_read

import distribute_jax as dj
from distribute_jax._mesh import split_sharding
from distribute_jax._values import Layout
from distribute_jax.strategies._tpu import in_topology_order
from tests.tpu.devices import hosts

LOCAL = dj.cluster_resolver.TPUClusterResolver("local")
DeviceAssignment = dj.tpu.experimental.DeviceAssignment
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)


def tpu(replicas: int, cores: int, **options: Any) -> dj.TPUStrategy:
    """Replicas on blocks of a simulated v3-8."""
    shape = {1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 4: [1, 2, 1, 2], 8: [2, 2, 1, 2]}[cores]
    assignment = DeviceAssignment.build(dj.initialize_tpu_system(LOCAL), shape, None, replicas)
    return dj.TPUStrategy(LOCAL, experimental_device_assignment=assignment, **options)


def program_of(strategy: dj.Strategy) -> str:
    """Returns the text of the program that was compiled last."""
    *_, program = strategy._runner.cache.programs.values()
    return program.compiled.as_text()


class Net(nnx.Module):
    """Two layers; the output of the first can be split over the cores."""

    def __init__(self) -> None:
        self.first = nnx.Linear(8, 24, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(24, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.0, rngs=nnx.Rngs(dropout=1))
        self.second = nnx.Linear(24, 4, rngs=nnx.Rngs(2))


def trained(strategy: dj.Strategy, parts: list[int] | None, **options: Any) -> tuple[Any, Any]:
    """Three steps, the last on a partial batch; returns losses, gathered rows and weights."""
    with strategy.scope():
        model = Net()
        optimizer = dj.Optimizer(model, optax.adam(1e-2))
    first, second = model.first, model.second

    def step(x, y):
        def loss_of(model):
            hidden = model.first(x)
            if parts is not None:
                hidden = strategy.experimental_split_to_logical_devices(hidden, parts)
            predicted = model.second(model.dropout(jnp.tanh(hidden)))
            if parts is not None:
                predicted = strategy.experimental_replicate_to_logical_devices(predicted)
            return dj.compute_average_loss(jnp.square(predicted - y).sum(-1)), predicted

        (loss, predicted), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, grads)
        return dj.get_replica_context().all_reduce("sum", loss), predicted

    assert (first, second) == (model.first, model.second)
    batches = strategy.distribute_dataset([(X, Y), (X[::-1], Y[::-1]), (X[:13], Y[:13])])
    seen = [strategy.run(step, args=batch, options=dj.RunOptions(**options)) for batch in batches]
    losses = [float(loss) for loss, _ in seen]
    rows = [np.asarray(strategy.gather(predicted, axis=0)) for _, predicted in seen]
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return losses, [*rows, *weights]


@pytest.fixture(scope="module")
def one_device() -> tuple[Any, Any]:
    return trained(dj.OneDeviceStrategy("cpu:0"), None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("replicas", "cores", "parts"),
    [
        (4, 1, [1, 1]),
        (4, 2, [1, 2]),
        (4, 2, [2, 1]),
        (2, 4, [2, 2]),
        (2, 4, [1, 4]),
        (1, 8, [2, 4]),
    ],
)
def test_training_on_split_arrays_equals_one_device(replicas, cores, parts, one_device):
    """In the program the split array has the shape of one part."""
    strategy = tpu(replicas, cores)
    losses, arrays = trained(strategy, parts)
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-5)
    assert_close(arrays, one_device[1], rtol=2e-5, atol=2e-6)
    share = [16 // replicas, 24]
    part = ",".join(str(size // n) for size, n in zip(share, parts, strict=True))
    assert re.search(rf"f32\[{part}\]\S* (dot|fusion|tanh|custom-call)", program_of(strategy)), part


def test_each_core_computes_only_its_part_of_a_split_array():
    def flops(parts):
        strategy = tpu(4, 2)

        def step(x):
            hidden = x @ jnp.ones((8, 32))
            if parts is not None:
                hidden = strategy.experimental_split_to_logical_devices(hidden, parts)
            return jnp.sin(hidden).sum(-1)

        (batch,) = strategy.distribute_dataset([X])
        strategy.run(step, args=(batch,))
        *_, program = strategy._runner.cache.programs.values()
        return program.compiled.cost_analysis()["flops"]

    assert flops([1, 2]) < 0.6 * flops(None)


def test_per_replica_values_have_one_part_for_each_replica_of_two_cores():
    strategy = tpu(4, 2)
    assert dict(strategy.mesh.shape) == {"data": 4, "model": 2}
    assert strategy.num_replicas_in_sync == 4
    assert len(strategy.extended.worker_devices) == 4
    with strategy.scope():
        mirrored = dj.Variable(3.0)
        own = sum_on_read()
    made = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(made, batch):
        context = dj.get_replica_context()
        own.assign_add(made)
        everyone = context.all_gather(made[None], 0)
        return context.replica_id_in_sync_group, everyone, jnp.zeros((0, 2)) + made, batch

    (batch,) = strategy.distribute_dataset([np.arange(7.0)])
    ids, everyone, nothing, rows = strategy.run(step, args=(made, batch))
    assert [int(i) for i in ids.values] == [0, 1, 2, 3]
    assert [part.shape for part in nothing.values] == [(0, 2)] * 4
    no_rows = dj.PerReplica(
        jax.device_put(X[:0], split_sharding(strategy.mesh)), strategy.mesh, layout=Layout.JOINED
    )
    assert len(no_rows.values) == 4
    assert [part.tolist() for part in rows.values] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [v.tolist() for v in strategy.experimental_local_results(everyone)] == [[0, 1, 2, 3]] * 4
    assert float(strategy.reduce("sum", made, axis=None)) == 6.0
    assert float(strategy.reduce("mean", rows, axis=0)) == 3.0
    assert strategy.gather(rows, axis=0).tolist() == list(range(7))
    assert (len(mirrored.values), [float(v) for v in own.values]) == (4, [0, 1, 2, 3])
    assert float(own.read_value()) == 6.0
    assert strategy.extended.variable_created_in_scope(mirrored)
    dj.check_in_sync(mirrored)


def test_a_dataset_for_each_replica_is_placed_on_all_of_its_cores():
    strategy = tpu(4, 2)
    options = dj.InputOptions(experimental_replication_mode="per_replica")
    (batch,) = strategy.distribute_datasets_from_function(
        lambda context: [np.full(2 + context.input_pipeline_id % 2, context.input_pipeline_id)],
        options,
    )
    assert [part.tolist() for part in batch.values] == [[0, 0], [1] * 3, [2, 2], [3] * 3]
    assert len(batch.global_array.addressable_shards) == 8


def test_a_partition_spec_of_the_user_names_the_cores():
    """The axes of the cores are automatic inside run, so JAX's own constraint works."""
    strategy = tpu(4, 2)

    def step(x):
        return jax.lax.with_sharding_constraint(2 * x, PartitionSpec(None, "model"))

    (batch,) = strategy.distribute_dataset([X])
    np.testing.assert_array_equal(strategy.gather(strategy.run(step, args=(batch,)), axis=0), 2 * X)
    assert "f32[4,4]" in program_of(strategy)


@pytest.mark.exhaustive
def test_verify_compares_with_one_replica_on_its_cores():
    strategy = tpu(4, 2)
    losses, _ = trained(strategy, [1, 2], verify="first")
    assert len(losses) == 3
    w = jnp.ones(8)

    def wrong(w, x):
        x = strategy.experimental_split_to_logical_devices(x, [1, 2])
        return dj.get_replica_context().all_reduce("sum", (x @ w).mean())

    (batch,) = strategy.distribute_dataset([X])
    with pytest.raises(dj.NotEqualError, match=re.escape("4.000 times")):
        strategy.run(wrong, args=(w, batch), options=dj.RunOptions(verify="first"))


def test_pmap_refuses_replicas_of_two_cores():
    with pytest.raises(dj.LoweringError, match="2 cores"):
        tpu(4, 2).run(lambda: 1.0, options=dj.RunOptions(lowering="pmap"))


CORES = 2
REFUSED = {
    "rank": ("split", [2], "list of 2 numbers"),
    "no list": ("split", 2, "list of 2 numbers"),
    "zero": ("split", [0, 2], "must be an integer >= 1; got 0"),
    "product": ("split", [2, 2], "must multiply to 2, the number of cores of a replica"),
    "whole": ("split", [1, 1], "got [1, 1]"),
    "divide": ("split", [2, 1], "dim 0 of size 5 into 2 parts"),
    "several cores": ("assign", 1, "SPMD"),
    "no such core": ("assign", 2, "must be an integer >= 0 and < 2; got 2"),
    "bool": ("assign", True, "got True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_cores_is_a_value_error(case: str):
    kind, argument, wanted = REFUSED[case]
    strategy = tpu(4, CORES)
    method = {
        "split": strategy.experimental_split_to_logical_devices,
        "assign": strategy.experimental_assign_to_logical_device,
    }[kind]
    with pytest.raises(ValueError, match=re.escape(wanted)):
        strategy.run(lambda: method(jnp.ones((5, 6)), argument))


def test_the_methods_are_called_in_a_step_of_the_same_strategy():
    strategy = tpu(4, 2)
    with pytest.raises(RuntimeError, match="outside of run"):
        strategy.experimental_replicate_to_logical_devices(jnp.ones(2))
    with pytest.raises(RuntimeError, match=r"dj\.get_strategy\(\)"):
        dj.MirroredStrategy([0]).run(
            lambda: strategy.experimental_split_to_logical_devices(jnp.ones(2), [2])
        )
    with pytest.raises(ValueError, match="tensor must be one array; got list"):
        strategy.run(lambda: strategy.experimental_replicate_to_logical_devices([jnp.ones(2)]))


def test_with_one_core_the_methods_change_nothing():
    strategy = dj.experimental.TPUStrategy()
    assert (strategy.num_replicas_in_sync, strategy.mesh.axis_names) == (8, ("data",))

    def step():
        x = strategy.experimental_assign_to_logical_device(jnp.arange(4.0), 0)
        x = strategy.experimental_split_to_logical_devices(x, [1])
        return strategy.experimental_replicate_to_logical_devices(x)

    assert strategy.run(step).tolist() == [0, 1, 2, 3]


@pytest.mark.exhaustive
def test_state_of_replicas_with_two_cores_is_saved_and_restored(tmp_path):
    with tpu(4, 2).scope():
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with dj.MirroredStrategy([0, 1]).scope():
        other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    kernel = np.asarray(model.kernel[...])
    with dj.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": model})
        manager.restore(1, {"model": other})
        np.testing.assert_array_equal(other.kernel[...], kernel)
        model.kernel[...] = model.kernel[...] * 0
        manager.restore(1, {"model": model})
    np.testing.assert_array_equal(model.kernel[...], kernel)
    assert len(model.kernel[...].sharding.device_set) == 8


def test_spmd_partitioning_cannot_be_turned_off():
    with pytest.raises(ValueError, match="must be one of True; got False"):
        dj.TPUStrategy(experimental_spmd_xla_partitioning=False)


def neighbours(one: Any, other: Any) -> bool:
    return sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) <= 1


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite"])
def test_the_replicas_of_a_process_are_contiguous_neighbours(kind):
    """JAX's order over all hosts of a 4 × 4 grid alternates between hosts."""
    order = in_topology_order(hosts(2, 2, kind)[::-1])
    owners = [device.process_index for device in order]
    assert owners == sorted(owners)
    assert sorted(device.id for device in order) == list(range(16))
    first = order[:4]
    steps = sum(neighbours(a, b) for a, b in itertools.pairwise(first))
    assert steps >= (3 if kind == "TPU v5 lite" else 2)


def test_eight_chips_of_a_host_are_ordered_as_a_ring():
    devices = [dataclasses.replace(chip, process_index=0) for chip in hosts(2, 1, "TPU v5 lite")]
    order = in_topology_order(devices)
    assert {chip.id for chip in order} == set(range(8))
    assert all(neighbours(a, b) for a, b in itertools.pairwise([*order, order[0]]))


def test_simulated_devices_keep_their_order():
    assert in_topology_order(jax.devices()[::-1]) == jax.devices()
