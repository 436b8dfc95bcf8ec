"""Connects the processes of a job: a rendezvous, then ``jax.distributed``, then the watchdog."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

import jax

from distribute_jax import cluster_resolver
from distribute_jax._errors import (
    BackendStartedError,
    ClusterError,
    DeadlineExceededError,
    NoClusterError,
)
from distribute_jax._jax_private import backend_is_started, coordination_client
from distribute_jax._supervision import JOB, xla_flags
from distribute_jax.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver
from distribute_jax.processes._divergence import KeyValueStore
from distribute_jax.processes._job import ClusterOptions, Job, ProcessInfo, current_job, set_job
from distribute_jax.processes._liveness import ExitHandler, Watchdog, last_seen
from distribute_jax.processes._preemption import exit_unsaved
from distribute_jax.processes._rendezvous import (
    Handshake,
    join_rendezvous,
    listen,
    serve_rendezvous,
)
from distribute_jax.processes._signals import on_sigterm
from distribute_jax.processes._status import activity

_LOG = logging.getLogger("distribute_jax")
_SAME_VERSIONS = ("jax", "jaxlib", "flax")
_COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_timeout_seconds",
    "--xla_gpu_nccl_termination_timeout_seconds",
)
_TOO_LATE = (
    "{caller}: this is one of {count} processes, but JAX has already started its devices in this process "
    "alone. Make the strategy before anything else that computes: before any array, nnx.Rngs, jax.devices() "
    "or jax.local_devices()."
)


def connect(
    resolver: ClusterResolver | None,
    options: ClusterOptions | None,
    caller: str,
    collective_seconds: float | None = None,
) -> ClusterResolver:
    """Connects this process with the others of its job, once; returns the resolver of the cluster."""
    resolver = _detected(caller) if resolver is None else resolver
    options = options or ClusterOptions()
    count, index = resolver.num_processes, resolver.process_id
    if jax.distributed.is_initialized():
        _adopt(count, index, options, caller)
    elif count == 1:
        _LOG.info("%s: one process, its local devices only.", caller)
    elif backend_is_started():
        raise BackendStartedError(_TOO_LATE.format(caller=caller, count=count))
    else:
        _limit_collectives(collective_seconds or options.step_seconds)
        _start(resolver, count, index, options, caller)
    return resolver


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
        RuntimeError: JAX has already started (``BackendStartedError``), or the processes cannot
            connect (``ClusterError``).
        TimeoutError: a process did not connect in time.

    Example:
        >>> import distribute_jax as dj
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> dj.experimental_connect_to_cluster(resolver)

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental_connect_to_cluster
    """
    connect(cluster_spec_or_resolver, cluster_options, "experimental_connect_to_cluster")


def _detected(caller: str) -> ClusterResolver:
    try:
        return cluster_resolver.detect()  # loaded here, with all it looks for
    except NoClusterError:
        _LOG.info("%s: no cluster was detected, so this process is the only worker.", caller)
        return SimpleClusterResolver(ClusterSpec({}), task_type="worker", task_id=0)


def _start(
    resolver: ClusterResolver, count: int, index: int, options: ClusterOptions, caller: str
) -> None:
    address = resolver.coordinator_address
    processes: list[ProcessInfo] = []
    bind = None
    if address is not None:
        handshake = Handshake(index, _facts(count), os.environ.get(JOB, ""))
        if index:
            processes = join_rendezvous(address, handshake, count, options.start_seconds)
        else:
            listener, bind = listen(address)
            processes = serve_rendezvous(listener, handshake, count, options.start_seconds)
    local = resolver.local_process_id if _shares_devices(processes, index) else None
    # This library handles SIGTERM itself, by `on_sigterm` and `Preemption`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=count,
            process_id=index,
            local_device_ids=local,
            cluster_detection_method=resolver.detection_method if address is None else "deactivate",
            coordinator_bind_address=bind,
            initialization_timeout=max(int(options.start_seconds), 1),
            heartbeat_timeout_seconds=options.heartbeat_seconds,
            shutdown_timeout_seconds=options.shutdown_seconds,
        )
    except jax.errors.JaxRuntimeError as error:
        text = str(error).split("\n", 1)[0]
        kind = DeadlineExceededError if "DEADLINE_EXCEEDED" in text else ClusterError
        raise kind(
            f"{caller}: jax.distributed could not connect process {index} of {count} at {address}: "
            f"{text}\nLook at the output of the other processes, and run `distribute-jax doctor` on each "
            "machine."
        ) from error
    _watch(Job(index, count, options, KeyValueStore(coordination_client()), processes))


def _facts(count: int) -> dict[str, str]:
    """Returns what must be equal on all processes, as far as it is known before JAX starts."""
    return {
        "number of processes": str(count),
        **{f"version of {name}": version(name) for name in _SAME_VERSIONS},
        "XLA_FLAGS": " ".join(sorted(xla_flags(os.environ))),
    }


def _shares_devices(processes: Sequence[ProcessInfo], index: int) -> bool:
    """True if several processes on this machine have to divide its accelerators."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return False  # each process has its own simulated devices
    # If the others are unknown, do as JAX's own detection.
    return not processes or [p.host for p in processes].count(processes[index].host) > 1


def _watch(new: Job) -> None:
    new.last_seen = partial(last_seen, new)
    set_job(new)
    activity().watched = True
    watchdog = Watchdog(new, activity())
    ExitHandler(new, watchdog)
    on_sigterm(partial(exit_unsaved, new, "SIGTERM: this process was asked to stop."))
    watchdog.start()


def _adopt(count: int, index: int, options: ClusterOptions, caller: str) -> None:
    """Uses the job that this library, or the user, has already connected."""
    if (count, index) != (jax.process_count(), jax.process_index()):
        raise ClusterError(
            f"{caller}: this is process {index} of {count}, but jax.distributed is started already, and this "
            f"is process {jax.process_index()} of {jax.process_count()}. Make the first strategy with the "
            "same cluster, or leave the start to this library."
        )
    if count > 1 and current_job().is_alone:
        _watch(Job(index, count, options, KeyValueStore(coordination_client())))


def _limit_collectives(seconds: float) -> None:
    """Sets XLA's timeouts, so that collectives between processes fail instead of waiting forever."""
    flags = os.environ.get("XLA_FLAGS", "")
    limit = round(min(max(seconds, 1), 2**31 - 1))  # of 32 bits; infinity stands for no limit
    new = [f"{flag}={limit}" for flag in _COLLECTIVE_FLAGS if flag not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()
