"""One process of a job gets SIGTERM: all save at one common step, exit, and go on from there."""

from __future__ import annotations

from pathlib import Path

import preempt_functions
import pytest

import distribute_jax as dj
from distribute_jax.testing import Fault, LocalCluster


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", [0, 1])
def test_all_save_at_one_step_and_go_on_at_the_next_example(process: int, tmp_path: Path):
    """Test 6: agreed exit code, one checkpoint, and in the end the weights of a job left alone, bitwise."""
    cluster = LocalCluster(2, 1, timeout=60, grace=None)
    told = cluster.run(
        preempt_functions.loop,
        str(tmp_path / "told"),
        0.02,
        faults=[Fault("terminate", process=process, at_step=12)],
        check=False,
    )
    assert [r.exit_code for r in told] == [42, 42], told[0].stderr + told[1].stderr
    (saved,) = dj.CheckpointManager(tmp_path / "told").all_steps()
    assert 12 <= saved < 60
    again = cluster.run(preempt_functions.loop, str(tmp_path / "told"), 0.0)
    alone = cluster.run(preempt_functions.loop, str(tmp_path / "alone"), 0.0)
    assert [r.value["first"] for r in again] == [saved + 1] * 2
    assert [r.value["last"] for r in again + alone] == [60] * 4
    assert len({r.value["weights"] for r in again + alone}) == 1


@pytest.mark.exhaustive
def test_a_job_that_never_asks_ends_at_once(tmp_path: Path):
    """Test 8: SIGTERM ends the process that gets it, and the other ends with it; plain JAX would go on."""
    results = LocalCluster(2, 1, timeout=40, grace=None).run(
        preempt_functions.never_polls,
        str(tmp_path),
        faults=[Fault("terminate", process=1, at_step=5)],
        check=False,
    )
    assert [r.exit_code for r in results] == [44, 143]
    assert not any(r.ended_by_cluster for r in results)
    assert "SIGTERM: this process was asked to stop." in results[0].stderr
