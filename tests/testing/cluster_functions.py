"""Functions that the processes of a ``LocalCluster`` run in its tests."""

from __future__ import annotations

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import distribute_jax as dj


def connect():
    resolver = dj.cluster_resolver.detect()
    jax.distributed.initialize(
        resolver.coordinator_address,
        resolver.num_processes,
        resolver.process_id,
        coordinator_bind_address=resolver.coordinator_address,
        initialization_timeout=60,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )


def listeners():
    """Returns the addresses at which this process listens."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        found += [
            r[1].rpartition(":")[0] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in own
        ]
    return sorted(set(found))


def add_up(scale):
    """Sums over all devices of all processes, and returns facts about this one."""
    connect()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    here = np.arange(jax.local_device_count(), dtype=np.float32) + 10 * jax.process_index()
    array = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("data")), here)
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))(array)
    print("hello from", jax.process_index())
    print("and this is stderr", file=sys.stderr)
    multihost_utils.sync_global_devices("end")
    return {
        "total": total * scale["factor"],
        "devices": (jax.device_count(), jax.local_device_count()),
        "listeners": listeners(),
    }


def plain(value):
    """Returns its argument and environment variables, without connecting."""
    return value, os.environ["DISTRIBUTE_JAX_PROCESS_ID"], os.environ.get("COLOUR")


def count(steps, seconds=0.0):
    for step in range(steps):
        dj.report_step(step)
        time.sleep(seconds)
    return steps


def count_together(folder, processes, steps):
    """Reports steps once all processes have started."""
    open(os.path.join(folder, os.environ["DISTRIBUTE_JAX_PROCESS_ID"]), "w").close()
    while len(os.listdir(folder)) < processes:
        time.sleep(0.01)
    return count(steps, 0.05)
