"""Devices as users name them: a ``jax.Device``, an index, or TensorFlow's strings."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax.strategies._idle import note_other_processes

_LOG = logging.getLogger("distribute_jax")
_NAME = re.compile(
    r"^/?(?:job:\w+/?)?(?:replica:\d+/?)?(?:task:\d+/?)?(?:device:)?(?P<kind>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
_KINDS = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}


def local_devices() -> list[jax.Device]:
    """Gives this process's devices of the default backend."""
    return list(jax.local_devices())


def find_device(name: Any) -> jax.Device:
    """Finds the device that a user means.

    Args:
        name: a ``jax.Device``, an index into the local devices, or a string such as ``"gpu:0"``,
            ``"/gpu:0"`` or ``"/job:localhost/device:GPU:0"``, in any letter case.

    Raises:
        ValueError: no local device is called so; the message lists those there are.
    """
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
    """Gives the host's first CPU device, or None where JAX runs without it."""
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
