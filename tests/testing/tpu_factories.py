"""Factories of ``TPUStrategy`` for the conformance suite: the first core of replica i is on device i."""

from __future__ import annotations

import jax

import distribute_jax as dj


def tpu(devices: list[jax.Device]) -> dj.TPUStrategy:
    return _on_cores(len(devices), 1)


def tpu_two_cores(devices: list[jax.Device]) -> dj.TPUStrategy:
    """Replicas of two cores; all first cores come before the second ones."""
    return _on_cores(len(devices), 2)


def _on_cores(replicas: int, cores: int) -> dj.TPUStrategy:
    resolver = dj.cluster_resolver.TPUClusterResolver("local")
    topology = dj.initialize_tpu_system(resolver)
    own = topology.device_coordinates[0]
    chosen = [[own[core * replicas + i] for core in range(cores)] for i in range(replicas)]
    return dj.TPUStrategy(resolver, dj.tpu.experimental.DeviceAssignment(topology, chosen))
