"""Parameter servers: workers compute closures, servers store the state and apply updates in one order.

In the order of a closure: ``_runner`` traces a scheduled function; ``_coordinator`` queues it; ``_log``
admits and numbers it; ``_engine`` drives the workers, threads or (``_processes``, ``_ray``) other processes,
whose program is ``_child``; ``_worker`` is one run of it; ``_store`` is one server; ``_state`` knows which
server stores what. ``_input`` is what differs between workers.
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
