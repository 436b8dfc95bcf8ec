"""A job that loses a process continues with the others, takes it back, and computes the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from itertools import chain, groupby, pairwise
from pathlib import Path

import elastic_program
import numpy as np
import pytest

import distribute_jax as dj

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
KILLED_AT = 11


def launched(folder: Path, rank: int, drop: float) -> list[list]:
    """Returns what the first process printed of each step: step, processes, ids, loss, time."""
    options = ["--min-processes=2", "--max-processes=3", "--rejoin=1", "--devices-per-process=2"]
    program = [elastic_program.__file__, str(folder), str(rank), str(KILLED_AT), str(drop)]
    done = subprocess.run(
        [sys.executable, "-m", "distribute_jax", "launch", *options, *program],
        capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"process {rank} " in done.stderr
    start = "[0] step "
    return [json.loads(x[len(start) :]) for x in done.stdout.splitlines() if x.startswith(start)]


def ends(steps: list[list]) -> tuple[int, int]:
    """Checks the membership of a job; returns after which steps two went on, and then all again."""
    runs = [(of, [s[0] for s in run]) for of, run in groupby(steps, key=lambda step: step[1])]
    assert [of for of, _ in runs] == [3, 2, 3]
    (_, first), (_, second), (_, third) = runs
    assert (first[0], first[-1]) == (1, KILLED_AT)
    assert second[0] in (5, 9), "after the newest checkpoint that was complete"
    (gap,) = [b[4] - a[4] for a, b in pairwise(steps) if a[1] > b[1]]
    print(f"the others went on after {gap:.1f} s")
    assert gap < 6 * dj.ClusterOptions().heartbeat_seconds
    assert third[0] == second[-1] + 1, "they were saved at the step that they had come to"
    return second[0] - 1, second[-1]


def assert_same(steps: list[list], wanted: list[tuple]) -> None:
    """Asserts that the last computation of each step had these examples, in this order, and this loss."""
    last = {step: (ids, loss) for step, _, ids, loss, *_ in steps}
    assert [(i, last[i][0]) for i in sorted(last)] == [(step, ids) for step, ids, _ in wanted]
    np.testing.assert_allclose(
        [last[i][1] for i in sorted(last)], [loss for _, _, loss in wanted], rtol=1e-5
    )


def test_the_batches_and_losses_are_those_of_a_job_that_lost_nothing(tmp_path: Path):
    """Three processes, two, three; each example once in an epoch, losses within 1e-5."""
    steps = launched(tmp_path / "job", rank=1, drop=0.0)
    ends(steps)
    alone = dj.MirroredStrategy(range(6))
    wanted = list(elastic_program.own_loop(alone, tmp_path / "alone", 0.0))
    assert_same(steps, wanted)
    per_epoch = len(wanted) // elastic_program.EPOCHS
    seen = [ids for _, ids, _ in wanted]
    for epoch in range(elastic_program.EPOCHS):
        ids = chain.from_iterable(seen[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(ids) == list(range(elastic_program.ROWS))


def test_dropout_is_that_of_a_run_with_the_same_membership(tmp_path: Path):
    """Process 0 is killed; each step has the dropout of its number of replicas."""
    steps = launched(tmp_path / "job", rank=0, drop=0.3)
    saved, rejoined = ends(steps)
    wanted = []
    for replicas, until in ((6, saved), (4, rejoined), (6, None)):
        strategy = dj.MirroredStrategy(range(replicas))
        wanted += elastic_program.own_loop(strategy, tmp_path / "alone", 0.3, until)
    assert_same(steps, wanted)


IN_TORCHRUN = """
import json, os, signal, sys, time
import jax
import elastic_program
import distribute_jax as dj

strategy = dj.MultiWorkerMirroredStrategy()
is_first_time = not os.path.exists(sys.argv[1])
for step, ids, loss in elastic_program.own_loop(strategy, sys.argv[1], 0.0):
    if dj.is_chief():
        with open(sys.argv[2], "a") as file:
            print(json.dumps([step, jax.process_count(), ids, loss]), file=file)
    elif is_first_time and step == 11:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1 if jax.process_count() == 2 else 3)  # until torchrun has taken the other in
"""


def is_open(port: int) -> bool:
    """Returns whether a program listens at a port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_machine_rejoins_under_torchrun(tmp_path: Path):
    """Two agents, one, two: the second is killed with its process, and restarted."""
    pytest.importorskip("torch")
    program = tmp_path / "train.py"
    program.write_text(IN_TORCHRUN)
    printed = tmp_path / "steps"
    printed.touch()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "XLA_FLAGS": "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }

    def agent() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        return subprocess.Popen(
            [*command, str(program), str(tmp_path / "job"), str(printed)], env=environment
        )

    def lines() -> list[list]:
        return [json.loads(line) for line in printed.read_text().splitlines()]

    agents = [agent()]
    try:
        while not is_open(port):
            time.sleep(0.2)
        agents += [agent()]
        while agents[1].poll() is None or lines()[-1][1] == 2:
            time.sleep(0.2)
        agents += [agent()]
        assert [agents[i].wait(timeout=150) for i in (0, 2)] == [0, 0]
    finally:
        for one in agents:
            one.kill()
            one.wait()
    steps = lines()
    assert [of for of, _ in groupby(step[1] for step in steps)] == [2, 1, 2]
    alone = dj.MirroredStrategy([0, 1])
    assert_same(steps, list(elastic_program.own_loop(alone, tmp_path / "alone", 0.0)))
