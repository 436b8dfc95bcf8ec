"""Ranges divided into batches, and helpers that read elements."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from distribute_jax._mesh import num_replicas, replica_mesh
from distribute_jax._values import PerReplica
from distribute_jax.data import DistributedDataset, InputOptions
from distribute_jax.data._feed import GlobalBatches
from distribute_jax.data.sources import Source, find_source


def mesh_of(replicas: int) -> jax.sharding.Mesh:
    return replica_mesh(jax.devices()[:replicas])


def batches(n: int, size: int, *, drop_remainder: bool = False) -> list[np.ndarray]:
    """The numbers 0 to n - 1 in batches."""
    rows = np.arange(n, dtype=np.int32)
    cut = [rows[i : i + size] for i in range(0, n, size)]
    return [batch for batch in cut if len(batch) == size or not drop_remainder]


def distribute(
    source: Any,
    replicas: int,
    partial: str = "mask",
    *,
    guard: Callable[[], None] = lambda: None,
    **options: Any,
) -> DistributedDataset:
    """Like strategy.distribute_dataset, without a strategy."""
    chosen = InputOptions(partial=partial, **options)
    batches_source = source if isinstance(source, Source) else find_source(source)
    feed = GlobalBatches(batches_source, chosen, replicas)
    return DistributedDataset(feed, mesh=mesh_of(replicas), guard=guard)


def values(element: PerReplica) -> list[list[int]]:
    """Each replica's real examples, through the public property."""
    return [np.asarray(value).tolist() for value in element.values]


def all_values(dataset: Any) -> list[list[list[int]]]:
    return [values(element) for element in dataset]


def real_parts(element: PerReplica) -> Iterator[np.ndarray]:
    """Each replica's real examples, cut by NumPy, which compiles nothing."""
    whole = np.asarray(element.global_array)
    replicas = num_replicas(element.mesh)
    share = len(whole) // replicas
    for replica, part in enumerate(whole.reshape(replicas, share, *whole.shape[1:])):
        yield part if element.counts is None else part[: element.counts[replica]]


def examples_in(element: PerReplica) -> list[Any]:
    """An element's real examples, in order."""
    return [row for part in real_parts(element) for row in part.tolist()]
