"""Log messages about devices and processes that a program leaves idle."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax import _errors

TF_CONFIG = (
    '{"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, '
    '"task": {"type": "%s", "index": 0}}'
)


@pytest.fixture
def notices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a process that has logged nothing yet."""
    monkeypatch.setattr(_errors, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="distribute_jax"):
        yield caplog


def texts(notices: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in notices.records]


def test_fit_on_one_of_several_devices_is_logged_once(notices: pytest.LogCaptureFixture):
    x = np.ones((4, 1), np.float32)
    for strategy in (None, None, dj.OneDeviceStrategy(0)):
        dj.experimental_set_strategy(strategy)
        model = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        model.compile(optax.sgd(0.1), loss="mse")
        model.fit(x, x, verbose=0)
        dj.experimental_set_strategy(None)
    [text] = texts(notices)
    assert "fit runs on 1 of the 8 local devices: no strategy was in scope" in text
    assert "with dj.MirroredStrategy().scope(): model = dj.Model(...)" in text


def test_a_scope_that_is_never_entered_is_logged_with_its_line(
    notices: pytest.LogCaptureFixture, s2: dj.Strategy
):
    for _ in range(2):
        s2.scope()
    with s2.scope():
        pass
    scope = s2.scope()
    scope.__enter__()
    scope.__exit__(None, None, None)
    del scope
    [text] = texts(notices)
    assert "test_idle_devices.py:" in text
    assert "with strategy.scope():" in text


@pytest.mark.parametrize("number", [4, np.int64(4)])
@pytest.mark.parametrize("make", [dj.MirroredStrategy, dj.CentralStorageStrategy])
def test_a_bare_number_of_devices_is_refused(make: type, number: int):
    """It would be device 4, where other libraries mean four devices."""
    with pytest.raises(
        dj.ArgumentError, match=r"\[4\] for device 4, or range\(4\) for the first 4"
    ):
        make(number)
    assert dj.MirroredStrategy(range(4)).num_replicas_in_sync == 4
    assert dj.OneDeviceStrategy(4).num_replicas_in_sync == 1


def test_a_tpu_strategy_without_a_tpu_is_logged_unless_devices_are_simulated(
    notices: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    local = dj.cluster_resolver.TPUClusterResolver("local")
    dj.TPUStrategy(local)
    assert not texts(notices)
    monkeypatch.setenv("XLA_FLAGS", "")
    topology = dj.initialize_tpu_system(local)
    assignment = dj.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    dj.TPUStrategy(local, experimental_device_assignment=assignment)
    assert not texts(notices)
    dj.TPUStrategy(local)
    [text] = texts(notices)
    assert "TPUStrategy found no TPU and uses 8 cpu device(s)" in text
    assert "dj.simulate(8)" in text


def test_xla_flags_that_are_set_too_late_are_logged_once(
    notices: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    for count in (8, 16, 16):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={count}")
        dj.MirroredStrategy()
    [text] = texts(notices)
    assert "XLA_FLAGS asks for 16 host devices, and JAX has 8" in text
    assert "Set it before Python starts, or call dj.simulate(16)" in text


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "2222"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, 3),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, 2),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, 1),
        ({"TF_CONFIG": TF_CONFIG % "worker"}, 2),
        ({"TF_CONFIG": TF_CONFIG % "evaluator"}, 1),
        ({"TF_CONFIG": "{"}, 1),
        ({}, 1),
    ],
)
def test_a_mirrored_strategy_in_one_of_several_processes_is_logged(
    notices: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    processes: int,
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        dj.MirroredStrategy()
    wanted = [f"MirroredStrategy: this process is one of {processes}"] if processes > 1 else []
    assert [text.partition(",")[0] for text in texts(notices)] == wanted


@pytest.mark.exhaustive
def test_xla_flags_that_are_set_too_late_in_a_real_process():
    """As in a notebook."""
    code = (
        "import os, jax; jax.devices()\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "import distribute_jax as dj\n"
        "print(dj.MirroredStrategy().num_replicas_in_sync)\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    ran = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr
    assert "XLA_FLAGS asks for 8 host devices, and JAX has 1" in ran.stderr


def test_a_strategy_on_all_devices_logs_nothing(notices: pytest.LogCaptureFixture):
    assert dj.MirroredStrategy().num_replicas_in_sync == len(jax.local_devices())
    assert not texts(notices)
