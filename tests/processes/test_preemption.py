"""One process of a job gets SIGTERM: all save at one common step, exit, and go on from there."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import fault_functions
import jax
import numpy as np
import pytest
from flax import nnx
from test_faults import ended_within, run

import distribute_jax as dj
from distribute_jax.checkpoint import _preemption_handler
from distribute_jax.testing import Fault, LocalCluster

pytestmark = pytest.mark.exhaustive


def loop(directory, pause):
    """Trains with dropout and shuffled data; gives the digest of all that is saved."""
    strategy = fault_functions.make_strategy(step_seconds=30.0)
    step, model = fault_functions.make_step(strategy)
    rows = np.arange(240, dtype=np.float32).reshape(60, 4) / 240
    source = dj.data.from_arrays(rows).shuffle(seed=1).batch(2).repeat(2)
    iterator = iter(strategy.distribute_dataset(source))
    first = None
    with (
        dj.CheckpointManager(directory, max_to_keep=None) as manager,
        manager.preemptible({"model": model}, iterator, grace_seconds=20.0) as block,
    ):
        for x in iterator:
            first = block.step if first is None else first
            strategy.run(step, args=(x,))
            time.sleep(pause * (1 + jax.process_index()))
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(model)):
        total.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return {"first": first, "last": block.step, "weights": total.hexdigest()}


def handled_on_compute_engine(directory, by_event):
    """As ``handled``, on VMs with GPUs, of which the one of process 1 may be stopped for maintenance."""
    _preemption_handler._is_compute_engine_with_gpu = lambda: True
    _preemption_handler._COMPUTE_ENGINE_GRACE_SECONDS = 3.0 if by_event else 3600.0
    begin = time.monotonic()

    def will_be_stopped():
        return by_event and dj.is_chief() is False and time.monotonic() - begin > 2.0

    _preemption_handler._maintenance_watcher = lambda: will_be_stopped
    return handled(directory, None, 0.05)


def handled(directory, grace, pause):
    """Counts replicas under TensorFlow's handler; process 0 gets no signal."""
    strategy = fault_functions.make_strategy(step_seconds=30.0)
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step():
        total.assign_add(1.0)
        return dj.get_replica_context().all_reduce("sum", 1.0)

    handler = dj.experimental.PreemptionCheckpointHandler(
        dj.cluster_resolver.detect(),
        {"total": total},
        dj.CheckpointManager(directory, max_to_keep=None),
        dj.experimental.TerminationConfig(grace_period=grace),
    )
    while handler.total_run_calls < 120:
        handler.run(strategy.run, step)
        time.sleep(pause)
    return float(total.numpy())


def never_polls(directory):
    """A job without a preemptible loop."""
    del directory
    return fault_functions.loop(10_000)


@pytest.mark.parametrize("process", [0, 1])
def test_all_save_at_one_step_and_go_on_at_the_next_example(process: int, tmp_path: Path):
    """Agreed exit code, one checkpoint, and bitwise the weights of an uninterrupted job."""
    cluster = LocalCluster(2, 1, timeout=60, grace=None)
    fault = Fault("terminate", process=process, at_step=12)
    stopped = cluster.run(loop, str(tmp_path / "stopped"), 0.02, faults=[fault], check=False)
    assert [r.exit_code for r in stopped] == [42, 42], stopped[0].stderr + stopped[1].stderr
    (saved,) = dj.CheckpointManager(tmp_path / "stopped").all_steps()
    assert 12 <= saved < 60
    again = cluster.run(loop, str(tmp_path / "stopped"), 0.0)
    alone = cluster.run(loop, str(tmp_path / "alone"), 0.0)
    assert [r.value["first"] for r in again] == [saved + 1] * 2
    assert [r.value["last"] for r in again + alone] == [60] * 4
    assert len({r.value["weights"] for r in again + alone}) == 1


def test_sigterm_ends_a_job_without_a_preemptible_loop_at_once(tmp_path: Path):
    """SIGTERM ends the process that gets it, and the other ends with it; plain JAX would go on."""
    results = run(never_polls, str(tmp_path), faults=[Fault("terminate", process=1, at_step=5)])
    assert [r.exit_code for r in results] == [44, 143]
    ended_within(results, 1.0)
    assert "SIGTERM: this process was asked to stop." in results[0].stderr


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(("grace", "checkpoints"), [(0, 1), (3, 2)])
def test_under_tensorflows_handler_no_step_is_lost(
    grace: int, checkpoints: int, processes: int, tmp_path: Path
):
    """SIGTERM to one process: all save at common steps, once or twice, and the count ends exact."""
    cluster = LocalCluster(processes, 1, timeout=120, grace=None)
    faults = [Fault("terminate", process=processes // 2, at_step=5)]
    stopped = cluster.run(handled, str(tmp_path), grace, 0.05, faults=faults, check=False)
    assert [r.exit_code for r in stopped] == [42] * processes, "".join(r.stderr for r in stopped)
    saved = dj.CheckpointManager(tmp_path).all_steps()
    assert len(saved) == checkpoints
    assert saved[0] >= 5
    again = cluster.run(handled, str(tmp_path), grace, 0.0)
    assert [r.value for r in again] == [120.0 * processes] * processes


@pytest.mark.parametrize(("by_event", "code", "checkpoints"), [(True, 143, 2), (False, 42, 1)])
def test_compute_engines_grace_period_is_that_of_its_notice_on_all_processes(
    by_event: bool, code: int, checkpoints: int, tmp_path: Path
):
    """After SIGTERM to one process, all save and exit at once, and with the code of a preemption."""
    faults = [] if by_event else [Fault("terminate", process=1, at_step=5)]
    results = LocalCluster(2, 1, timeout=120, grace=None).run(
        handled_on_compute_engine, str(tmp_path), by_event, faults=faults, check=False
    )
    assert [r.exit_code for r in results] == [code] * 2, "".join(r.stderr for r in results)
    assert len(dj.CheckpointManager(tmp_path).all_steps()) == checkpoints
