"""The example of an elastic job: nodes of a Ray cluster are lost and join, and the loss stays the same."""

from __future__ import annotations

import re
import subprocess
from itertools import groupby

import pytest
from example_program import command, environment, output

pytestmark = pytest.mark.exhaustive
ray = pytest.importorskip("ray")

STEPS = 400


def losses(lines: list[str]) -> dict[int, float]:
    """Returns the last loss that was printed for each step."""
    found = re.findall(rf"step (\d+)/{STEPS}  loss (\S+)", "\n".join(lines))
    return {int(step): float(loss) for step, loss in found}


def test_the_loss_is_that_of_a_job_that_lost_nothing(tmp_path, monkeypatch):
    """Three nodes, two, three: all save before the third joins; one process alone has the same losses."""
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("XLA_FLAGS")  # the nodes hand it on: one device for each worker
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    options = (f"--steps={STEPS}", "--every=10", f"--directory={tmp_path / 'job'}")
    job = subprocess.Popen(
        command("elastic_ray", *options, f"--address={cluster.address}"),
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert job.stdout is not None
    lines: list[str] = []
    try:
        for line in job.stdout:
            lines.append(line)
            if len(nodes) == 3 and f"step 20/{STEPS}" in line:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            if len(nodes) == 2 and f"step 50/{STEPS}" in line:
                nodes.append(cluster.add_node(num_cpus=1))
        assert job.wait(timeout=60) == 0, "".join(lines)
    finally:
        job.kill()
        job.stdout.close()
        cluster.shutdown()
    text = "".join(lines)
    workers = re.findall(r"Training with (\d) workers", text)
    assert [of for of, _ in groupby(workers)] == ["3", "2", "3"], text
    starts = [int(step) for step in re.findall(r"Resuming after step (\d+)", text)]
    assert starts[0] == 0
    assert 10 <= starts[1] < 50
    assert starts[2] >= 50
    alone = output("digits_job", *options[:2], f"--directory={tmp_path / 'alone'}", folder=tmp_path)
    wanted = losses(alone.splitlines())
    assert losses(lines) == pytest.approx(wanted, abs=2e-4)
    assert len(wanted) == STEPS // 10
