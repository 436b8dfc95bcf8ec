"""Collectives over the replicas inside ``run``, and ``check_in_sync``, which compares their copies."""

from distribute_jax.collectives._check_in_sync import check_in_sync as check_in_sync
from distribute_jax.collectives._cross_device_ops import (
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
    RingAllReduce as RingAllReduce,
)
from distribute_jax.collectives._markers import assume_mirrored as assume_mirrored
from distribute_jax.collectives._reduction import (
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
    ReduceOp as ReduceOp,
)
