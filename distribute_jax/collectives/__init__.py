"""Collectives over the replicas: the reduce operations on trees, inside ``run``; and are they in sync?"""

from distribute_jax.collectives._cross_device import CrossDeviceOps as CrossDeviceOps
from distribute_jax.collectives._hierarchical import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from distribute_jax.collectives._in_sync import check_in_sync as check_in_sync
from distribute_jax.collectives._mirrored import assume_mirrored as assume_mirrored
from distribute_jax.collectives._native import NcclAllReduce as NcclAllReduce
from distribute_jax.collectives._options import (
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from distribute_jax.collectives._reduce_op import ReduceOp as ReduceOp
from distribute_jax.collectives._ring import RingAllReduce as RingAllReduce
from distribute_jax.collectives._to_one import ReductionToOneDevice as ReductionToOneDevice

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
