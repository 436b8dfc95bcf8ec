"""``simulate``: virtual devices before JAX starts, and a clear error afterwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import distribute_jax as dj
from distribute_jax._supervision import pool_threads


def python(code: str, **env: str) -> str:
    """Runs code in a new Python without the devices of this one; returns its output."""
    clean = {
        k: v for k, v in os.environ.items() if k not in {"XLA_FLAGS", "NPROC", "JAX_PLATFORMS"}
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


COUNT = "import distribute_jax as dj; {}; print(dj.MirroredStrategy().num_replicas_in_sync)"
SIX = {"XLA_FLAGS": "--xla_force_host_platform_device_count=6", "JAX_PLATFORMS": "cpu"}
PROGRAMS = {
    "threads": (
        "import distribute_jax as dj, os; dj.simulate(5); import jax; d = jax.devices();"
        "print(len(d), d[0].platform, os.environ['NPROC'])",
        {},
        "5 cpu 10",
    ),
    "twice": (COUNT.format("dj.simulate(3); dj.simulate(3)"), {}, "3"),
    "the variable alone": (COUNT.format("pass"), SIX, "6"),
    "wins over the variable": (COUNT.format("dj.simulate(2)"), SIX, "2"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PROGRAMS)
def test_a_process_has_the_requested_devices_and_enough_threads(case: str):
    code, environment, printed = PROGRAMS[case]
    assert python(code, **environment).strip() == printed


def test_simulate_after_jax_started_says_what_to_do():
    jax.devices()
    with pytest.raises(RuntimeError) as caught:
        dj.simulate(4)
    assert "JAX has already started with 8 CPU device(s)" in str(caught.value)
    assert "restart the kernel" in str(caught.value)
    assert "--xla_force_host_platform_device_count=4" in str(caught.value)


@pytest.mark.exhaustive
def test_simulate_does_not_start_jax():
    code = (
        "import distribute_jax as dj; dj.simulate(3); import jax;from distribute_jax._jax_private import "
        "backend_is_started as started;print(started(), len(jax.devices()))"
    )
    assert python(code).split() == ["False", "3"]


@pytest.mark.exhaustive
def test_simulated_processes_of_a_tf_config_job_connect():
    """Two processes of three devices each are one strategy of six replicas."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        workers = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in (first, second)]
    code = (
        "import distribute_jax as dj; dj.simulate(3); s = dj.MultiWorkerMirroredStrategy();"
        "print(float(s.reduce('sum', s.run(lambda: "
        "dj.get_replica_context().replica_id_in_sync_group * 1.0))), s.num_replicas_in_sync)"
    )
    config = [
        json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        for index in range(2)
    ]
    with ThreadPoolExecutor() as pool:
        outs = list(
            pool.map(lambda text: python(code, TF_CONFIG=text, JAX_PLATFORMS="cpu"), config)
        )
    assert all("15.0 6" in out for out in outs), outs


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", True, None])
def test_a_wrong_number_is_refused(n: object):
    with pytest.raises(ValueError, match="n must be an integer"):
        dj.simulate(n)


@pytest.mark.parametrize(("before", "threads"), [("64", "64"), ("1", "6"), ("", "6"), ("4.0", "6")])
def test_thread_pools_keep_a_larger_size_of_the_user(before: str, threads: str) -> None:
    assert pool_threads(3, {"NPROC": before}) == threads
