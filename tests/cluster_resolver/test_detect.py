"""The order of ``detect()``, and its message when there is no cluster."""

from __future__ import annotations

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver import _ORDER

AROUND = {
    "LaunchedClusterResolver": {
        "DISTRIBUTE_JAX_NUM_PROCESSES": "1",
        "DISTRIBUTE_JAX_PROCESS_ID": "0",
        "DISTRIBUTE_JAX_ADDRESS": "127.0.0.1:4242",
    },
    "TFConfigClusterResolver": {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
    "TorchrunClusterResolver": {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    },
    "OpenMPIClusterResolver": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "SlurmClusterResolver": {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "a",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    },
    "SageMakerClusterResolver": {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"},
    "TPUClusterResolver": {"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0"},
    "KubernetesClusterResolver": {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "0"},
}


@pytest.mark.parametrize("name", AROUND)
def test_detect_uses_the_first_resolver_that_is_present(monkeypatch, name):
    assert list(AROUND) == [*_ORDER]
    for later in _ORDER[_ORDER.index(name) :]:
        for variable, value in AROUND[later].items():
            monkeypatch.setenv(variable, value)
    assert type(dj.cluster_resolver.detect()).__name__ == name


def test_without_a_cluster_the_message_lists_what_was_looked_for(monkeypatch):
    """Variables that are set are listed too, since half a launch is usually a mistake."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(RuntimeError, match="No cluster was detected") as error:
        dj.cluster_resolver.detect()
    assert isinstance(error.value, dj.NoClusterError)
    lines = str(error.value).splitlines()
    for line, name in zip(lines[1:], _ORDER, strict=False):
        assert line.strip().startswith(f"{name}: ")
    assert "(found RANK; missing WORLD_SIZE, MASTER_ADDR, MASTER_PORT)" in lines[3]
    assert "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK" in lines[4]
    assert lines[-2].endswith("task_type='worker', task_id=0).")


def test_a_malformed_description_raises(monkeypatch):
    """Otherwise a typo in TF_CONFIG would train on a single machine."""
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(dj.TFConfigError):
        dj.cluster_resolver.detect()
