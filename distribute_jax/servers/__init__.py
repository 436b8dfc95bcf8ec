"""Parameter servers: workers compute closures, servers hold the state and apply updates in one order.

In the order of a closure: ``_runner`` traces a scheduled function, ``_coordinator`` has the queue and the
errors, ``_log`` admits and numbers, ``_engine`` drives the workers, ``_worker`` is what one does, ``_store``
is one server, ``_state`` says what is where. ``_processes`` and ``_ray`` have other processes (``_roles``).
``_input`` has what differs from worker to worker.
"""

from distribute_jax.servers._coordinator import Coordinator, Recording, Stats
from distribute_jax.servers._engine import Engine, threads
from distribute_jax.servers._input import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValue,
    experimental_get_current_worker_index,
    in_closure,
)
from distribute_jax.servers._processes import Processes, RemoteStore
from distribute_jax.servers._ray import Cluster
from distribute_jax.servers._runner import RemoteValue, ServersRunner
from distribute_jax.servers._store import Store

__all__ = [
    "Cluster",
    "Coordinator",
    "Engine",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "Processes",
    "Recording",
    "RemoteStore",
    "RemoteValue",
    "ServersRunner",
    "Stats",
    "Store",
    "experimental_get_current_worker_index",
    "in_closure",
    "threads",
]
