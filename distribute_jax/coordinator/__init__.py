"""``ClusterCoordinator``, and what its closures get and return: ``tf.distribute.coordinator``."""

from distribute_jax._lazy import publish
from distribute_jax.coordinator._cluster_coordinator import ClusterCoordinator
from distribute_jax.servers import (
    PerWorkerValue,
    RemoteValue,
    Stats,
    experimental_get_current_worker_index,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "Stats",
    "experimental_get_current_worker_index",
]

publish(globals(), __all__, "distribute_jax.coordinator")
