"""Logs, once for each cause, that devices or processes stand idle because of how a program starts."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import jax

from distribute_jax._warn import log_once
from distribute_jax.processes import job

_HOST_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_NO_STRATEGY = (
    "fit runs on 1 of the %d local devices: no strategy was in scope when the dj.Model was made. Make it "
    "under one: with dj.MirroredStrategy().scope(): model = dj.Model(...). Where one device is what you "
    "want, dj.OneDeviceStrategy(0) says so."
)
_NOT_ENTERED = (
    "strategy.scope() at %s was never entered, so models made there do not belong to the strategy. Write "
    "with strategy.scope(): and indent what it is for, or dj.experimental_set_strategy(strategy)."
)
_NO_TPU = (
    "%s found no TPU and uses %d %s device(s). On a TPU VM install jax[tpu]; to try the program on this "
    "machine call dj.simulate(8) right after the imports; for GPUs make a dj.MirroredStrategy()."
)
_TOO_LATE = (
    "XLA_FLAGS asks for %d host devices, and JAX has %d: it was set after JAX had started, which reads it "
    "once. Set it before Python starts, or call dj.simulate(%d) right after the imports."
)
_ALONE = (
    "%s: this process is one of %d, and the strategy uses its devices alone. Each process trains a model of "
    "its own, and in each dj.is_chief() is True. To train one model on all of them make a "
    "dj.MultiWorkerMirroredStrategy()."
)


def note_default_strategy() -> None:
    """Logs that ``fit`` runs without a strategy where there are several devices."""
    if (devices := jax.local_device_count()) > 1:
        log_once(_NO_STRATEGY, devices)


def note_not_entered(line: str) -> None:
    """Logs that a scope was made on a line and thrown away."""
    log_once(_NOT_ENTERED, line, about=line)


def note_no_tpu(caller: str) -> None:
    """Logs that a TPU was asked for where there is none, and none is simulated."""
    devices = jax.local_devices()
    if devices[0].platform != "tpu" and not _wanted_host_devices():
        log_once(_NO_TPU, caller, len(devices), devices[0].platform)


def note_flags_too_late() -> None:
    """Logs that XLA_FLAGS asks for more host devices than there are."""
    wanted = _wanted_host_devices()
    if wanted > jax.local_device_count() and jax.local_devices()[0].platform == "cpu":
        log_once(_TOO_LATE, wanted, jax.local_device_count(), wanted)


def note_other_processes(caller: str) -> None:
    """Logs that a strategy of one process was made in one of several that were started together."""
    if job() is None and (processes := _launched_processes()) > 1:
        log_once(_ALONE, caller, processes)


def _wanted_host_devices() -> int:
    """How many CPU devices the user has asked for; 0 if the number was left to JAX."""
    config: Any = jax.config
    if config.jax_num_cpu_devices > 0:  # As by dj.simulate; JAX reads the flag only without it.
        return int(config.jax_num_cpu_devices)
    counts = _HOST_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 0


def _launched_processes() -> int:
    """How many processes the environment tells of: only what is written there is read."""
    for name, beside in (
        ("DISTRIBUTE_JAX_NUM_PROCESSES", "DISTRIBUTE_JAX_PROCESS_ID"),
        ("WORLD_SIZE", "MASTER_ADDR"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("NUM_PROCESSES", "JOB_COMPLETION_INDEX"),
    ):
        if (count := os.environ.get(name, "")).isdigit() and beside in os.environ:
            return int(count)
    if hosts := os.environ.get("TPU_WORKER_HOSTNAMES"):
        return len(hosts.split(","))
    try:
        if "SM_HOSTS" in os.environ:
            return len(json.loads(os.environ["SM_HOSTS"]))
        jobs = json.loads(os.environ.get("TF_CONFIG") or "{}")
        if jobs.get("task", {}).get("type") not in ("chief", "worker"):
            return 1
        cluster = jobs["cluster"]
        return sum(len(cluster.get(name, ())) for name in ("chief", "worker"))
    except (AttributeError, LookupError, TypeError, ValueError):
        return 1  # MultiWorkerMirroredStrategy says what is wrong.
