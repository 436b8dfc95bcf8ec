"""``MultiWorkerMirroredStrategy`` in a single process."""

from __future__ import annotations

import json
import logging
from typing import Any

import jax
import numpy as np
import pytest

import distribute_jax as dj


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distribute_jax.cluster_resolver.detect", _nothing)


def _nothing() -> Any:
    raise dj.NoClusterError("nothing around this process")


def tf_config(monkeypatch: pytest.MonkeyPatch, cluster: Any, kind: str) -> Any:
    """Returns a resolver of a TF_CONFIG, as task 0 of a kind."""
    task = {"type": kind, "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    return dj.cluster_resolver.TFConfigClusterResolver()


def test_without_a_cluster_it_is_the_only_worker(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="distribute_jax"):
        strategy = dj.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    assert strategy.cluster_resolver.task_type == "worker"
    assert strategy.cluster_resolver.task_id == 0
    assert "the only worker" in caplog.text
    assert dj.is_chief()
    total = strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(())))
    assert float(total) == strategy.num_replicas_in_sync
    strategy.barrier("nobody else", timeout=1)


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        ({"worker": ["a:1"]}, "worker"),
        ({"worker": ["a:1"], "ps": ["b:1"], "evaluator": ["c:1"]}, "worker"),
        ({"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}, "evaluator"),
    ],
    ids=["one worker", "others are not counted", "evaluator"],
)
def test_a_task_that_trains_alone_connects_to_nobody(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, kind: str
):
    strategy = dj.MultiWorkerMirroredStrategy(tf_config(monkeypatch, cluster, kind))
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    assert strategy.cluster_resolver.task_type == kind
    assert not jax.distributed.is_initialized()


def test_several_workers_after_the_backend_has_started_are_refused(monkeypatch: pytest.MonkeyPatch):
    jax.numpy.ones(1)
    resolver = tf_config(monkeypatch, {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker")
    with pytest.raises(dj.BackendStartedError, match=r"before any array, nnx\.Rngs, jax\.devices"):
        dj.MultiWorkerMirroredStrategy(resolver)


@pytest.mark.parametrize("name", ["start_seconds", "step_seconds", "heartbeat_seconds"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), "5", True, None])
def test_times_to_wait_are_positive_numbers(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"ClusterOptions: {name} must be an? (number|integer)"):
        dj.ClusterOptions(**{name: value})


@pytest.mark.parametrize(("name", "timeout"), [("", 1), (3, 1), ("a", 0), ("a", "x"), ("a", True)])
def test_arguments_of_barrier_are_checked(name: Any, timeout: Any):
    """Also in a single process."""
    with pytest.raises(ValueError, match=r"trategy\.barrier: (name|timeout) must be"):
        dj.MultiWorkerMirroredStrategy().barrier(name, timeout)


def test_a_step_trains_as_on_one_device():
    losses = []
    for strategy in (dj.MultiWorkerMirroredStrategy(), dj.OneDeviceStrategy("cpu:0")):
        with strategy.scope():
            weight = dj.Variable(1.0, aggregation=dj.VariableAggregation.MEAN)

        def step(x: Any, weight: Any = weight) -> Any:
            loss = dj.compute_average_loss((weight * x - 1.0) ** 2)
            weight.assign_sub(0.1 * loss)
            return dj.get_replica_context().all_reduce("sum", loss)

        (x,) = strategy.distribute_dataset([np.arange(16, dtype=np.float32) / 16])
        losses.append(float(strategy.run(step, args=(x,))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
