"""Replicas of several cores over processes, the collectives between them, and strategies beside them."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
SOON = dj.ClusterOptions(start_seconds=90, step_seconds=60)


def trained(strategy: dj.Strategy, split: Any = lambda x: x) -> list[float]:
    """Two steps, the last one partial; the losses and a sum of the weights."""
    with strategy.scope():
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.sgd(0.1))

    def step(x):
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(jnp.square(split(model(x))).sum(-1))
        )(model)
        optimizer.update(model, grads)
        return dj.get_replica_context().all_reduce("sum", loss)

    losses = [
        float(strategy.run(step, args=(x,))) for x in strategy.distribute_dataset([X, X[:13]])
    ]
    return [*losses, float(np.abs(np.asarray(model.kernel[...].addressable_data(0))).sum())]


def summed(strategy: dj.Strategy, options: Any = None) -> tuple[list[float], str]:
    """Sums over all replicas, and the program that did it as it was traced and as it was compiled."""
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(x):
        return dj.get_replica_context().all_reduce("sum", [x, 2 * x, jnp.full(3, x)], options)

    sums = [float(np.ravel(s.addressable_data(0))[0]) for s in strategy.run(step, args=(values,))]
    *_, program = strategy._runner.cache.programs.values()
    return sums, f"{program.traced.jaxpr}\n{program.compiled.as_text()}"


def compute() -> dict[str, Any]:
    """Replicas of two cores over all processes; other collectives; strategies of this process alone."""
    resolver = dj.cluster_resolver.detect()
    topology = dj.initialize_tpu_system(resolver, cluster_options=SOON)
    assignment = dj.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4)
    tpu = dj.TPUStrategy(resolver, assignment, cluster_options=SOON)
    outcome: dict[str, Any] = {
        "tpu": (dict(tpu.mesh.shape), tpu.num_replicas_in_sync, topology.mesh_shape.tolist()),
        "trained": trained(tpu, lambda x: tpu.experimental_split_to_logical_devices(x, [1, 2])),
    }
    (batch,) = tpu.distribute_dataset([np.arange(7.0)])
    outcome["rows"] = [np.asarray(part).tolist() for part in batch.values]
    ids = tpu.run(lambda x: dj.get_replica_context().replica_id_in_sync_group, args=(batch,))
    outcome["ids"] = [int(i) for i in ids.values]
    outcome["mean"] = float(tpu.reduce("mean", batch, axis=0))
    outcome["gathered"] = np.asarray(tpu.gather(batch, axis=0)).tolist()
    outcome["refused"] = refused(topology)
    options = dj.experimental.CommunicationOptions
    workers = {
        "auto": {},
        "ring": {"communication_options": options(implementation="ring")},
        "packed": {"communication_options": options(bytes_per_pack=1 << 20)},
        "hierarchical": {"cross_device_ops": dj.HierarchicalCopyAllReduce()},
    }
    for name, given in workers.items():
        strategy = dj.MultiWorkerMirroredStrategy(resolver, **given, cluster_options=SOON)
        sums, text = summed(strategy)
        outcome[name] = sums, kinds(text)
        if name == "ring":
            outcome["ring, asked for XLA's"] = kinds(
                summed(strategy, options(implementation="nccl"))[1]
            )
    kind = dj.FullyShardedStrategy if jax.process_index() else dj.MultiWorkerMirroredStrategy
    with pytest.raises(dj.ProcessesDifferError) as mixed:  # neither divides anything here
        kind(cluster_resolver=resolver, cluster_options=SOON).run(jnp.sin, args=(1.0,))
    outcome["mixed"] = str(mixed.value)
    outcome["alone"] = alone()
    return outcome


def kinds(text: str) -> dict[str, int]:
    """How often each collective stands in the text of a program."""
    names = ("psum[", "all-reduce(", "collective-permute(", "reduce-scatter(")
    return {name[:-1]: text.count(name) for name in names}


def refused(topology: Any) -> list[str]:
    """What device assignments that do not fit the processes say."""
    assignment = dj.tpu.experimental.DeviceAssignment
    said = []
    for given in (
        assignment.build(topology, [2, 2, 1, 2]),
        assignment.build(topology, [1, 1, 1, 1], num_replicas=3),
        assignment(topology, topology.device_coordinates[::-1].reshape(-1, 1, 4)),
    ):
        try:
            dj.TPUStrategy(experimental_device_assignment=given, cluster_options=SOON)
        except ValueError as error:
            said.append(str(error))
    return said


def alone() -> dict[str, Any]:
    """MirroredStrategy and OneDeviceStrategy in one of several processes."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distribute_jax").addHandler(handler)
    logging.getLogger("distribute_jax").setLevel(logging.INFO)
    cluster = {"worker": ["host0:1", "host1:1"]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    )
    strategies = dj.MirroredStrategy(), dj.OneDeviceStrategy("cpu:0")
    return {
        "replicas": [strategy.num_replicas_in_sync for strategy in strategies],
        "own devices": all(
            device.process_index == jax.process_index()
            for strategy in strategies
            for device in strategy.mesh.devices.flat
        ),
        "trained": [trained(strategy) for strategy in strategies],
        "log": [line for line in lines if "TF_CONFIG" in line],
    }


@pytest.fixture(scope="module")
def outcome():
    """The results of two processes with four devices each."""
    return [result.value for result in LocalCluster(2, 4).run(compute)]


@pytest.fixture(scope="module")
def one_device():
    return trained(dj.OneDeviceStrategy("cpu:0"))


def test_replicas_of_two_cores_over_two_processes_train_as_one_device(outcome, one_device):
    for i, process in enumerate(outcome):
        assert process["tpu"] == ({"data": 4, "model": 2}, 4, [2, 2, 1, 2])
        np.testing.assert_allclose(process["trained"], one_device, rtol=1e-5)
        assert process["rows"] == [[[0, 1], [2, 3]], [[4, 5], [6]]][i]
        assert process["ids"] == [[0, 1], [2, 3]][i]
        assert (process["mean"], process["gathered"]) == (3.0, list(range(7)))


def test_an_assignment_that_does_not_fit_the_processes_is_refused(outcome):
    """A replica over two processes, processes with unlike numbers of replicas, and another order."""
    over, uneven, order = outcome[0]["refused"]
    assert "belong to processes [0, 1]" in over
    assert "belong to processes [0, 0, 0]" in uneven
    assert "belong to processes [1, 1, 1, 1, 0, 0, 0, 0]" in order
    assert outcome[1]["refused"] == outcome[0]["refused"]


def test_strategies_of_different_kinds_are_named_before_their_first_step(outcome):
    """Even where the step and its state are the same, so that later steps alone would differ."""
    for process in outcome:
        kinds = (
            "strategy: MultiWorkerMirroredStrategy on process 0, FullyShardedStrategy on process 1"
        )
        assert kinds in process["mixed"]


def test_the_collectives_between_processes_are_the_requested_ones(outcome):
    """By the strategy's options or operation, unless the call says otherwise; the sums are the same."""
    for process in outcome:
        assert {tuple(process[n][0]) for n in ("auto", "ring", "packed", "hierarchical")} == {
            (28.0, 56.0, 28.0)
        }
        auto = {"psum": 3, "all-reduce": 1, "collective-permute": 0, "reduce-scatter": 0}
        assert process["auto"][1] == auto
        assert process["ring"][1]["all-reduce"] == 0
        assert process["ring"][1]["collective-permute"] > 0
        assert process["ring, asked for XLA's"]["all-reduce"] == 1
        assert process["packed"][1]["psum"] == 1
        assert process["hierarchical"][1]["reduce-scatter"] == 1


def test_strategies_of_one_process_use_its_devices_and_ignore_the_cluster(outcome, one_device):
    """They train on the whole batch, each process for itself, and a line of the log says so."""
    for process in outcome:
        alone = process["alone"]
        assert (alone["replicas"], alone["own devices"]) == ([4, 1], True)
        for numbers in alone["trained"]:
            np.testing.assert_allclose(numbers, one_device, rtol=1e-5)
        assert [line.split(":")[0] for line in alone["log"]] == [
            "MirroredStrategy ignores TF_CONFIG",
            "OneDeviceStrategy ignores TF_CONFIG",
        ]
