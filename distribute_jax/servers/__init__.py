"""Parameter servers: workers compute closures, servers hold the state and apply updates in one order.

In the order of a closure: ``_runner`` traces a scheduled function, ``_coordinator`` has the queue and the
errors, ``_log`` admits and numbers, an engine (``_threads``) reaches the workers, ``_store`` has the state.
``_input`` has what differs from worker to worker.
"""

from distribute_jax.servers._coordinator import Coordinator, Stats
from distribute_jax.servers._input import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValue,
    experimental_get_current_worker_index,
    in_closure,
)
from distribute_jax.servers._remote import RemoteValue
from distribute_jax.servers._runner import ServersRunner
from distribute_jax.servers._threads import Threads

__all__ = [
    "Coordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "RemoteValue",
    "ServersRunner",
    "Stats",
    "Threads",
    "experimental_get_current_worker_index",
    "in_closure",
]
