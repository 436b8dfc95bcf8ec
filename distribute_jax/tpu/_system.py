"""The calls with which TensorFlow programs for TPUs begin."""

from __future__ import annotations

from typing import Any

import jax

from distribute_jax import processes
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.processes import ClusterOptions, check_cluster_options, resolve_cluster
from distribute_jax.tpu._topology import Topology


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver | None = None,
    *,
    cluster_options: ClusterOptions | None = None,
) -> None:
    """Connects the processes of a job, for code that was written for TensorFlow.

    Making the strategy does the same, so new code needs no such call. A second call, and a strategy made
    after it, find the processes connected.

    Args:
        cluster_spec_or_resolver: a resolver, since a ``ClusterSpec`` does not say which of the processes
            this is; ``dj.cluster_resolver.detect()`` if None.
        cluster_options: how long the processes wait for each other.

    Raises:
        ValueError: it is not a resolver.
        RuntimeError: something has computed before (``BackendStartedError``), or the processes cannot
            meet (``ClusterError``).
        TimeoutError: a process did not come in time.

    Example:
        >>> import distribute_jax as dj
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> dj.experimental_connect_to_cluster(resolver)

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental_connect_to_cluster
    """
    connected(cluster_spec_or_resolver, cluster_options, "experimental_connect_to_cluster")


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    cluster_options: ClusterOptions | None = None,
) -> Topology:
    """Returns the topology of the cores of all processes; connects the processes if that is not done.

    JAX starts a TPU by itself, so nothing else is initialized, and nothing is lost by a second call.

    Args:
        cluster_resolver: knows the processes; ``dj.cluster_resolver.detect()`` if None.
        cluster_options: how long the processes wait for each other.

    Returns:
        The topology, from which ``DeviceAssignment.build`` makes replicas of several cores.

    Raises:
        ValueError: it is not a resolver.
        RuntimeError: as for ``experimental_connect_to_cluster``.
        TimeoutError: a process did not come in time.

    Example:
        >>> import distribute_jax as dj, jax
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> topology = dj.initialize_tpu_system(resolver)
        >>> topology.num_tasks * topology.num_tpus_per_task == len(jax.devices())
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/initialize_tpu_system
    """
    connected(cluster_resolver, cluster_options, "initialize_tpu_system")
    return Topology(jax.devices())


def connected(resolver: Any, options: Any, caller: str) -> ClusterResolver:
    """Connects the processes of a resolver; returns the resolver."""
    cluster = resolve_cluster(resolver, caller)
    timeouts = check_cluster_options(options, caller)
    processes.start(cluster, timeouts, timeouts.step_seconds, caller)
    return cluster
