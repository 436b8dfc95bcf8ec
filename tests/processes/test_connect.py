"""Decisions before JAX connects the processes."""

from __future__ import annotations

import math
import os

import pytest

from distribute_jax.processes import _connect
from distribute_jax.processes._job import ProcessInfo

HOSTS = {
    "alone on each machine": (["a", "b"], 0, False),
    "two on this machine": (["a", "a", "b"], 1, True),
    "two on another machine": (["a", "a", "b"], 2, False),
    "nobody knows": ([], 0, True),
}


@pytest.mark.parametrize("case", HOSTS)
def test_accelerators_are_divided_among_processes_of_one_machine(
    case: str, monkeypatch: pytest.MonkeyPatch
):
    """One process on a machine with eight GPUs has all eight; two there have one each."""
    hosts, index, divided = HOSTS[case]
    processes = [ProcessInfo(host, pid) for pid, host in enumerate(hosts)]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert _connect._shares_devices(processes, index) is divided
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert _connect._shares_devices(processes, index) is False


@pytest.mark.parametrize("wanted", [7.2, math.inf])
@pytest.mark.parametrize("seconds", [None, 90])
def test_collectives_get_a_timeout_unless_the_user_set_one(
    seconds: int | None, wanted: float, monkeypatch: pytest.MonkeyPatch
):
    """XLA reads the flags, of 32 bits, when the backend starts; existing ones are kept."""
    cpu, gpu = "--xla_cpu_collective_timeout_seconds", "--xla_gpu_nccl_termination_timeout_seconds"
    monkeypatch.setenv("XLA_FLAGS", f"{cpu}={seconds}" if seconds else "")
    _connect._limit_collectives(wanted)
    limit = 2**31 - 1 if wanted == math.inf else 7
    assert set(os.environ["XLA_FLAGS"].split()) == {f"{cpu}={seconds or limit}", f"{gpu}={limit}"}


def test_numbers_of_simulated_devices_may_differ_between_processes(monkeypatch: pytest.MonkeyPatch):
    """Processes may have different numbers of devices on the CPU; every other flag counts, in any order."""
    monkeypatch.setenv("XLA_FLAGS", "--b=2 --xla_force_host_platform_device_count=8 --a=1")
    first = _connect._facts(2)
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --b=2")
    assert first == _connect._facts(2)
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --b=3")
    assert first != _connect._facts(2)
    assert first != _connect._facts(3)
