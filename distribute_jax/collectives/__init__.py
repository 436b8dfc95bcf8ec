"""Collectives over the replicas: the reduce operations, on trees, inside ``run``."""

from distribute_jax.collectives._mirrored import assume_mirrored as assume_mirrored
from distribute_jax.collectives._reduce_op import ReduceOp as ReduceOp

__all__ = ["ReduceOp", "assume_mirrored"]
