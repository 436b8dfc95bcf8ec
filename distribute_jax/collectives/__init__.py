"""Collectives over the replicas: the reduce operations on trees, inside ``run``; and are they in sync?"""

from distribute_jax.collectives._algorithms import (
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from distribute_jax.collectives._check_in_sync import check_in_sync
from distribute_jax.collectives._cross_device_ops import CrossDeviceOps, NcclAllReduce
from distribute_jax.collectives._markers import assume_mirrored
from distribute_jax.collectives._options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "RingAllReduce",
    "assume_mirrored",
    "check_in_sync",
]
