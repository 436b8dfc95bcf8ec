"""All cross-device operations, and helpers that run one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import distribute_jax as dj

KINDS = {
    "nccl": dj.NcclAllReduce,
    "hierarchical": dj.HierarchicalCopyAllReduce,
    "ring": dj.RingAllReduce,
}
ALGORITHMS: dict[str, Callable[[], dj.CrossDeviceOps | None]] = {
    "default": lambda: None,
    **{
        f"{name}, {packs} packs": functools.partial(kind, packs)
        for name, kind in KINDS.items()
        for packs in (0, 1, 2)
    },
    "to one": dj.ReductionToOneDevice,
}
"""Functions that create each operation."""

context = dj.get_replica_context

OWN = ("hierarchical, 1 packs", "ring, 1 packs", "ring, 2 packs", "to one")
"""The operations that the library implements itself."""


def strategy_with(ops: dj.CrossDeviceOps | None, replicas: int) -> dj.MirroredStrategy:
    """A strategy that combines its replicas by an operation."""
    return dj.MirroredStrategy(list(range(replicas)), cross_device_ops=ops)


def on_replicas(strategy: dj.Strategy, values: Sequence[Any]) -> Any:
    """Distributes one tree of host values to each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def locals_of(strategy: dj.Strategy, nest: Any) -> list[Any]:
    """Returns the tree of each replica as NumPy arrays."""
    return [jax.tree.map(np.asarray, part) for part in strategy.experimental_local_results(nest)]
