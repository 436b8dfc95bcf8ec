"""Parameter servers: workers compute closures, servers store the state and apply updates in one order.

A closure is a scheduled function with its arguments. ``_runner`` traces it; ``_halves`` splits it into
what a worker and each server do, by ``_divide`` and ``_rows``, and ``_device_program`` compiles and sends
that; ``_coordinator`` queues it; the log of ``_updates`` admits and numbers it; ``_engines`` drives the
workers, threads or processes (on Ray ``_ray``), whose program is ``_child``; ``_worker`` runs it; the
stores of ``_updates`` are the servers; ``_state`` knows which server stores what; ``_wire`` has messages,
``_input`` what differs between workers.
"""

from distribute_jax.servers._coordinator import Coordinator as Coordinator, Stats as Stats
from distribute_jax.servers._engines import (
    Engine as Engine,
    Processes as Processes,
    RemoteStore as RemoteStore,
)
from distribute_jax.servers._input import (
    PerWorkerDataset as PerWorkerDataset,
    PerWorkerIterator as PerWorkerIterator,
    PerWorkerValue as PerWorkerValue,
    experimental_get_current_worker_index as experimental_get_current_worker_index,
    in_closure as in_closure,
)
from distribute_jax.servers._ray import Cluster as Cluster
from distribute_jax.servers._runner import (
    RemoteValue as RemoteValue,
    ServersRunner as ServersRunner,
)
from distribute_jax.servers._updates import Store as Store
