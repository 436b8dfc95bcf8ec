"""Processes of mpirun and torchrun: the strategy detects the job from their variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
PROGRAM = """
import numpy as np
import distribute_jax as dj

strategy = dj.MultiWorkerMirroredStrategy()
values = strategy.experimental_distribute_values_from_function(
    lambda context: np.float32(1 + context.replica_id_in_sync_group)
)
print(strategy.num_replicas_in_sync, float(strategy.reduce("sum", values, axis=None)), dj.is_chief())
"""


def torchrun(process: int, port: int) -> dict[str, str]:
    rank = {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": "2"}
    return rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def mpirun(process: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
        # The port of process 0 is made from the number of the job.
        "OMPI_MCA_orte_hnp_uri": f"{port << 16}.0;tcp://127.0.0.1:{port}",
    }


@pytest.mark.parametrize("launcher", [torchrun, mpirun])
def test_processes_of_another_launcher_form_one_job(
    launcher: Callable[[int, int], dict[str, str]], tmp_path: Path
) -> None:
    """With the environment that it sets; a sum over both is the same on both."""
    (tmp_path / "train.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    running = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py")],
            env=environment | launcher(i, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    lines = [out.splitlines()[-1:] for out, _ in outputs]
    assert lines == [["2 3.0 True"], ["2 3.0 False"]], outputs
