"""Devices as users name them, options that several strategies take, and warnings about idle devices."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax._user_frames import log_once
from distribute_jax.processes import current_job

_LOG = logging.getLogger("distribute_jax")
_NAME = re.compile(
    r"^/?(?:job:\w+/?)?(?:replica:\d+/?)?(?:task:\d+/?)?(?:device:)?(?P<kind>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
_KINDS = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}


def local_devices() -> list[jax.Device]:
    """Returns this process's devices of the default backend."""
    return list(jax.local_devices())


def find_device(name: Any) -> jax.Device:
    """Finds the device that a user means."""
    if isinstance(name, jax.Device):
        return _checked_local(name)
    if isinstance(name, int) and not isinstance(name, bool):
        devices = local_devices()
        if 0 <= name < len(devices):
            return devices[name]
    elif isinstance(name, str) and (match := _NAME.match(name)):
        devices = _of_kind(_KINDS.get(match["kind"].lower(), ""))
        index = int(match["index"] or 0)
        if index < len(devices):
            return devices[index]
    raise ArgumentError(
        f"There is no local device {name!r}. This process has {_listed_names()}. Use one of these "
        "names, an index, or a jax.Device from jax.local_devices()."
    )


def find_cpu() -> jax.Device | None:
    """Returns the host's first CPU device, or None where JAX runs without it."""
    devices = _of_kind("cpu")
    return devices[0] if devices else None


def find_devices(names: Sequence[Any] | None) -> list[jax.Device]:
    """Finds the devices of a strategy; None or an empty list means all local ones."""
    if names is None or (isinstance(names, Sequence) and not isinstance(names, str) and not names):
        return local_devices()
    if isinstance(names, (int, np.integer)) and not isinstance(names, bool):
        raise ArgumentError(
            f"The devices of a strategy cannot be the number {names}. Pass [{names}] for device {names}, "
            f"or range({names}) for the first {names}."
        )
    if isinstance(names, (str, jax.Device)):
        names = [names]
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise ArgumentError(
            f"The devices of a strategy cannot be {names!r:.80}. Pass a list, such as [0, 1] or "
            '["gpu:0", "gpu:1"], or None for all local devices.'
        )
    devices = [find_device(name) for name in names]
    twice = [name for name, device in zip(names, devices, strict=True) if devices.count(device) > 1]
    if twice:
        raise ArgumentError(
            f"The devices {list(map(str, twice))} name the same device more than once. Each replica "
            "has its own device: list each one once."
        )
    kinds = {device.platform for device in devices}
    if len(kinds) > 1:
        raise ArgumentError(
            f"A strategy cannot mix kinds of devices, but these are {sorted(kinds)}. Choose devices "
            "of one kind."
        )
    return devices


def note_cluster_ignored(caller: str) -> None:
    """Logs that a strategy of one process does not look at TF_CONFIG, or at other processes."""
    note_other_processes(caller)
    if os.environ.get("TF_CONFIG"):
        _LOG.info(
            "%s ignores TF_CONFIG: it uses the devices of this process alone. To train on those of all "
            "processes make a dj.MultiWorkerMirroredStrategy().",
            caller,
        )


def _of_kind(kind: str) -> list[jax.Device]:
    try:
        return list(jax.local_devices(backend=kind)) if kind else []
    except RuntimeError:  # JAX has no such backend on this machine
        return []


def _checked_local(device: jax.Device) -> jax.Device:
    if device.process_index == jax.process_index():
        return device
    raise ArgumentError(
        f"{device} belongs to process {device.process_index}, and this is process "
        f"{jax.process_index()}. This strategy works on the devices of one process: choose from "
        "jax.local_devices()."
    )


def _listed_names() -> str:
    names = [f"{d.platform}:{i}" for i, d in enumerate(local_devices())]
    return ", ".join(repr(name) for name in names[:16]) + (" and more" if len(names) > 16 else "")


def checked_sharding(given: Any, caller: str) -> bool:
    """Checks that the option is a bool."""
    if not isinstance(given, bool):
        raise ArgumentError(f"{caller}: shard_optimizer_state must be a bool; got {given!r}.")
    return given


def checked_axis_name(name: Any, mesh: Mesh, caller: str) -> str:
    """Returns the name, which must be a new one beside those of the mesh, or that of the replicas' axis."""
    taken = [axis for axis in mesh.axis_names if axis != DATA]
    if not isinstance(name, str) or not name or name in taken:
        raise ArgumentError(
            f"{caller}(axis_name={name!r}): it must be a string"
            + (f" other than {', '.join(map(repr, taken))}." if taken else ".")
        )
    return name


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
    if current_job().is_alone and (processes := _launched_processes()) > 1:
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
