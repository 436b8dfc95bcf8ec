"""Devices by name, options that several strategies take, and log messages about idle devices."""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distribute_jax import cluster_resolver as resolvers, processes
from distribute_jax._checks import check_choice, check_int, is_integer
from distribute_jax._errors import ArgumentError, DistributeError, log_once
from distribute_jax._mesh import DATA
from distribute_jax._supervision import DEVICE_COUNT
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from distribute_jax.processes import ClusterOptions, current_job

_LOG = logging.getLogger("distribute_jax")
_DEVICE_NAME = re.compile(
    r"^/?(?:job:\w+/?)?(?:replica:\d+/?)?(?:task:(?P<task>\d+)/?)?(?:device:)?"
    r"(?P<platform>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
_PLATFORMS = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}


def find_device(name: Any) -> jax.Device:
    """Returns the local device that a name, an index or a ``jax.Device`` refers to."""
    if isinstance(name, jax.Device):
        if name.process_index == jax.process_index():
            return name
        raise ArgumentError(
            f"{name} belongs to process {name.process_index}, and this is process {jax.process_index()}. "
            "This strategy works on the devices of one process: choose from jax.local_devices()."
        )
    if is_integer(name) and not isinstance(name, bool):
        devices, index = jax.local_devices(), operator.index(name)
        if 0 <= index < len(devices):
            return devices[index]
    elif isinstance(name, str) and (match := _DEVICE_NAME.match(name)):
        platform = _PLATFORMS.get(match["platform"].lower(), "")
        devices = local_devices(platform)
        if platform == "gpu" and not devices:
            raise ArgumentError(
                f"There is no device {name!r}: JAX sees no GPU. Install JAX with GPU support, pip install "
                "'distribute-jax[cuda13]'; distribute-jax doctor checks the installation."
            )
        index, process = int(match["index"] or 0), jax.process_index()
        if index < len(devices) and int(match["task"] or process) == process:
            return devices[index]
    names = [f"{d.platform}:{i}" for i, d in enumerate(jax.local_devices())]
    text = ", ".join(map(repr, names[:16])) + (" and more" if len(names) > 16 else "")
    raise ArgumentError(
        f"There is no local device {name!r}. This process has {text}. Use one of these "
        "names, an index, or a jax.Device from jax.local_devices()."
    )


def find_devices(names: Sequence[Any] | None) -> list[jax.Device]:
    """Returns the local devices of a strategy; all of them for None or an empty list."""
    names = [] if names is None else names
    if is_integer(names) and not isinstance(names, bool):
        raise ArgumentError(
            f"The devices of a strategy cannot be the number {names}. Pass [{names}] for device {names}, "
            f"or range({names}) for the first {names}."
        )
    if isinstance(names, (str, jax.Device)):
        names = [names]
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise ArgumentError(
            "The devices of a strategy must be a list, such as [0, 1] or ['gpu:0', 'gpu:1'], or None for "
            f"all local devices; got {names!r:.80}."
        )
    names = list(names)
    devices = [find_device(name) for name in names] or list(jax.local_devices())
    duplicates = [n for n, device in zip(names, devices, strict=False) if devices.count(device) > 1]
    if duplicates:
        raise ArgumentError(
            f"{list(map(str, duplicates))} refer to the same device; each replica needs a separate one."
        )
    platforms = {device.platform for device in devices}
    if len(platforms) > 1:
        raise ArgumentError(
            f"The devices of a strategy must be of one platform; got {sorted(platforms)}."
        )
    return devices


def connect(
    resolver: ClusterResolver | None,
    options: ClusterOptions | None,
    caller: str,
    start_seconds: float | None = None,
) -> tuple[ClusterResolver, list[jax.Device]]:
    """Connects the processes of a cluster, and returns its resolver and the devices of all processes."""
    resolver = processes.connect(resolver, options, caller, start_seconds)
    return resolver, sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


_CONNECT_HINT = "make a dj.MultiWorkerMirroredStrategy()"


def log_cluster_ignored(caller: str, hint: str = _CONNECT_HINT) -> None:
    """Logs that a strategy uses one process's devices although TF_CONFIG or a launcher started several."""
    if current_job().is_alone and (launched := _launched_processes()) > 1:
        log_once(
            "%s: this process is one of %d, and the strategy uses only its devices. Each process trains a "
            "separate model, and in each dj.is_chief() is True. To train one model on all of them %s.",
            caller,
            launched,
            hint,
        )
    if os.environ.get("TF_CONFIG"):
        _LOG.info(
            "%s ignores TF_CONFIG: it uses only the devices of this process. To train on those of all "
            "processes %s.",
            caller,
            hint,
        )


def check_replicas_per_device(caller: str, number: Any, ops: CrossDeviceOps | None = None) -> int:
    """Checks ``replicas_per_device``, which is bounded so that steps end, and that ``ops`` can be used."""
    number = check_int(f"{caller}: replicas_per_device", number, below=1 << 16)
    if number > 1 and isinstance(ops, _SENDING):
        raise ArgumentError(
            f"{caller}(cross_device_ops={ops!r}, replicas_per_device={number}): the replicas of a device run "
            "one after the other, so none can send to another. Leave one of the two out."
        )
    return number


_SENDING = (HierarchicalCopyAllReduce, ReductionToOneDevice, RingAllReduce)


def local_devices(platform: str) -> list[jax.Device]:
    """Returns this process's devices of a platform; an empty list if JAX has no such backend."""
    try:
        return list(jax.local_devices(backend=platform)) if platform else []
    except RuntimeError:
        return []


def check_axis_name(name: str, mesh: Mesh, caller: str) -> str:
    """Returns the name of the replicas' axis; raises if another axis of the mesh has it."""
    others = [axis for axis in mesh.axis_names if axis != DATA]
    if not name or name in others:
        rule = f" other than {', '.join(map(repr, others))}" if others else ""
        raise ArgumentError(f"{caller}: axis_name must be a non-empty str{rule}; got {name!r}.")
    return name


def log_default_strategy() -> None:
    """Logs that ``fit`` uses one of several devices, because no strategy is in scope."""
    if (devices := jax.local_device_count()) > 1:
        log_once(
            "fit runs on 1 of the %d local devices: no strategy was in scope when the dj.Model was made. "
            "Make it under one: with dj.MirroredStrategy().scope(): model = dj.Model(...). To train on one "
            "device, use dj.OneDeviceStrategy(0).",
            devices,
        )


def log_no_tpu(caller: str) -> None:
    """Logs that there is no TPU, unless devices are simulated."""
    devices = jax.local_devices()
    if devices[0].platform != "tpu" and not _requested_host_devices():
        log_once(
            "%s found no TPU and uses %d %s device(s). On a TPU VM install jax[tpu]; to try the program on "
            "this machine call dj.simulate(8) right after the imports; for GPUs make a "
            "dj.MirroredStrategy().",
            caller,
            len(devices),
            devices[0].platform,
        )


def log_ignored_flags() -> None:
    """Logs that XLA_FLAGS asks for more host devices than JAX has."""
    requested, devices = _requested_host_devices(), jax.local_device_count()
    if requested > devices and jax.local_devices()[0].platform == "cpu":
        log_once(
            "XLA_FLAGS asks for %d host devices, and JAX has %d: it was set after JAX had started, which "
            "reads it once. Set it before Python starts, or call dj.simulate(%d) right after the imports.",
            requested,
            devices,
            requested,
        )


def _requested_host_devices() -> int:
    """Returns how many CPU devices the user has asked for; 0 for JAX's default."""
    config: Any = jax.config
    if config.jax_num_cpu_devices > 0:  # set by dj.simulate; it takes precedence over XLA_FLAGS
        return int(config.jax_num_cpu_devices)
    counts = DEVICE_COUNT.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 0


_OFFLINE_VARIABLES = {
    "KubernetesClusterResolver": "NUM_PROCESSES",
    "TPUClusterResolver": "TPU_WORKER_HOSTNAMES",
}
"""The variable with which a resolver needs no request to know the number of processes."""


def _launched_processes() -> int:
    """Returns how many processes were launched together, according to the environment."""
    try:
        resolver = resolvers.detect()
        variable = _OFFLINE_VARIABLES.get(type(resolver).__name__)
        return resolver.num_processes if variable is None or variable in os.environ else 1
    except DistributeError:  # no cluster, or a malformed description
        return 1


_DETECT_HINT = "cluster_resolver=dj.cluster_resolver.detect()"


def devices_of_job(
    devices: Sequence[Any] | None,
    cluster_resolver: ClusterResolver | None,
    cluster_options: ClusterOptions | None,
    name: str,
) -> list[jax.Device]:
    """Returns the devices of this process or, with a cluster resolver, those of all its processes."""
    if cluster_resolver is None:
        if cluster_options is not None:
            raise ArgumentError(
                f"{name}: cluster_options needs a cluster_resolver: pass {_DETECT_HINT}."
            )
        log_cluster_ignored(name, f"pass {_DETECT_HINT}")
        return find_devices(devices)
    if devices is not None:
        raise ArgumentError(
            f"{name}: with a cluster_resolver it uses all devices of all processes, so leave out "
            f"devices={devices!r:.80}."
        )
    return connect(cluster_resolver, cluster_options, name)[1]


def check_memory_kind(name: str, value: str | None, device: jax.Device) -> None:
    """Raises unless a device has a memory of this kind, or it is None."""
    if value is not None:
        kinds = [memory.kind for memory in device.addressable_memories()]
        check_choice(f"{name} on {device}", value, kinds)
