"""Which results hold one row for each example of the batch: declared, or found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax

T = TypeVar("T")


@dataclass(frozen=True)
class PerExample:
    """Marks a result leaf that has one row for each example of the per-replica batch."""

    value: Any


def per_example(tree: T) -> T:
    """Declares that each array of a result has one row for each example of the replica's batch.

    ``local_results``, ``gather`` and ``reduce(axis=0)`` leave the padding of a partial batch out of
    such results. Usually ``run`` finds out by itself, by tracing the step at another batch size; this
    is for steps that cannot be traced at another size.

    Args:
        tree: a nest of arrays, dim 0 of each as long as this replica's share of the batch.

    Returns:
        The nest, marked; return it from the function given to ``run``.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> strategy = dj.OneDeviceStrategy("cpu:0")
        >>> strategy.run(lambda: dj.per_example(jnp.arange(2.0)))
        Array([0., 1.], dtype=float32)
    """
    return jax.tree.map(PerExample, tree)  # type: ignore[no-any-return]
