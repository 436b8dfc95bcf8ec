"""The calls with which TensorFlow programs for TPUs begin."""

from __future__ import annotations

import jax

from distribute_jax import processes
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.processes import ClusterOptions
from distribute_jax.tpu._topology import Topology


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver | None = None,
    *,
    cluster_options: ClusterOptions | None = None,
) -> None:
    """Connects the processes of a job, for code that was written for TensorFlow.

    Making the strategy does the same, so new code does not need it. Further calls do nothing.

    Args:
        cluster_spec_or_resolver: a resolver, because a ``ClusterSpec`` does not say which process this is;
            ``dj.cluster_resolver.detect()`` if None.
        cluster_options: the timeouts of the job.

    Raises:
        ValueError: ``cluster_spec_or_resolver`` is not a resolver.
        RuntimeError: JAX has computed before (``BackendStartedError``), or the processes cannot
            connect (``ClusterError``).
        TimeoutError: a process did not connect in time.

    Example:
        >>> import distribute_jax as dj
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> dj.experimental_connect_to_cluster(resolver)

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental_connect_to_cluster
    """
    processes.connect(cluster_spec_or_resolver, cluster_options, "experimental_connect_to_cluster")


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    cluster_options: ClusterOptions | None = None,
) -> Topology:
    """Returns the topology of the cores of all processes, after connecting the processes.

    JAX starts a TPU by itself, so nothing else is initialized, and a second call loses nothing.

    Args:
        cluster_resolver: a resolver; ``dj.cluster_resolver.detect()`` if None.
        cluster_options: the timeouts of the job.

    Returns:
        The topology, from which ``DeviceAssignment.build`` makes replicas of several cores.

    Raises:
        ValueError: ``cluster_resolver`` is not a resolver.
        RuntimeError: as for ``experimental_connect_to_cluster``.
        TimeoutError: a process did not connect in time.

    Example:
        >>> import distribute_jax as dj, jax
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> topology = dj.initialize_tpu_system(resolver)
        >>> topology.num_tasks * topology.num_tpus_per_task == len(jax.devices())
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/initialize_tpu_system
    """
    processes.connect(cluster_resolver, cluster_options, "initialize_tpu_system")
    return Topology(jax.devices())
