"""Placement: how each leaf of state is divided over the mesh between steps.

A leaf that the replicas share is divided along its largest dim that their number divides: not the first of
several dims where another does, since along it a scan goes over stacked layers. A leaf without such a dim
stays whole on each replica: padding it would change what an optax transformation sees of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax._messages import listed
from distribute_jax.program._aggregation import keeps_own_values

LEAST_ELEMENTS = 1024
"""Smaller arrays stay whole: what they take is nothing beside the collectives that sharing them costs."""


class PlacedLeaf(NamedTuple):
    """Where one array of state is stored between steps."""

    path: str
    """The variable, as ``blocks[0].kernel``."""
    shape: tuple[int, ...]
    """Of the whole array."""
    spec: PartitionSpec
    """How the devices of the mesh divide it; ``PartitionSpec()`` where each has the whole."""
    why: str
    """What decided that."""


@dataclass(frozen=True)
class Placement:
    """How each leaf of state is divided over a mesh."""

    mesh: Mesh
    shared: tuple[type[nnx.Variable[Any]], ...] = ()
    """The kinds of variables of which each replica keeps its share; others are whole on each."""

    def rows(
        self, names: Sequence[str], variables: Sequence[nnx.Variable[Any]]
    ) -> list[PlacedLeaf]:
        """Returns where each leaf is stored."""
        return [
            self._row(name, variable, leaf)
            for name, variable in zip(names, variables, strict=True)
            for leaf in jax.tree.leaves(variable.get_raw_value())
        ]

    def shardings(
        self, names: Sequence[str], variables: Sequence[nnx.Variable[Any]]
    ) -> tuple[NamedSharding | None, ...]:
        """Returns how each leaf is divided over the mesh; None where each device has the whole."""
        rows = self.rows(names, variables)
        self._check_divides(rows, variables)
        return tuple(NamedSharding(self.mesh, row.spec) if row.spec else None for row in rows)

    def _row(self, path: str, variable: nnx.Variable[Any], leaf: Any) -> PlacedLeaf:
        shape = tuple(jnp.shape(leaf))

        def row(why: str, dim: int | None = None) -> PlacedLeaf:
            return PlacedLeaf(path, shape, share_spec(dim), why)

        if keeps_own_values(variable):
            return row("each replica has its value")
        if not isinstance(variable, self.shared):
            return row("mirrored")
        if isinstance(variable, nnx.metrics.MetricState):
            return row("read on the host after each epoch")
        if _is_key(leaf):
            return row("a random key")
        if moved_at_once(shape) < LEAST_ELEMENTS:
            return row(f"less than {LEAST_ELEMENTS} elements")
        dim = share_dim(shape, replicas := self.mesh.shape[DATA])
        if dim is None:
            return row(_NOT_DIVISIBLE.format(replicas=replicas))
        return row(f"its share of dim {dim} on each of {replicas} replicas", dim)

    def _check_divides(
        self, rows: Iterable[PlacedLeaf], variables: Sequence[nnx.Variable[Any]]
    ) -> None:
        """Refuses a model of which nothing can be divided, although its parameters should be."""
        replicas = self.mesh.shape[DATA]
        if replicas == 1 or not any(
            isinstance(v, nnx.Param) and isinstance(v, self.shared) for v in variables
        ):
            return
        large = [row for row in rows if moved_at_once(row.shape) >= LEAST_ELEMENTS]
        refused = [row for row in large if row.why == _NOT_DIVISIBLE.format(replicas=replicas)]
        if refused and not any(row.spec for row in large):
            refused.sort(key=lambda row: -prod(row.shape))
            lines = listed([f"{row.path}: {list(row.shape)}" for row in refused])
            raise ArgumentError(_NOTHING.format(replicas=replicas, lines=lines))


def path_text(path: Sequence[Any]) -> str:
    """Returns the path of a variable as it is written in Python, as ``blocks[0].kernel``."""
    text = "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path
    )
    return text.removeprefix(".")


_NOT_DIVISIBLE = "no dim is a multiple of {replicas}"

_NOTHING = """\
FullyShardedStrategy can divide none of the parameters among its {replicas} replicas:
{lines}
One dim of an array must be a multiple of the number of replicas. Use fewer devices, or widths that are \
multiples of {replicas}; dj.MirroredStrategy() keeps the whole model on each device."""


def moved_at_once(shape: Sequence[int]) -> int:
    """Returns how many elements are gathered together: of stacked layers, those of one."""
    return prod(shape[1:] if len(shape) > 2 else shape)


def share_dim(shape: Sequence[int], replicas: int) -> int | None:
    """Returns the dim along which an array is divided; None where it stays whole."""
    fits = [dim for dim, size in enumerate(shape) if size and size % replicas == 0]
    if replicas == 1 or not fits or moved_at_once(shape) < LEAST_ELEMENTS:
        return None
    return max(fits, key=lambda dim: (dim > 0, shape[dim]))


def share_spec(dim: int | None) -> PartitionSpec:
    """Returns the placement of an array that is divided along a dim, or whole."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, DATA)


def data_dim(spec: PartitionSpec) -> int | None:
    """Returns the dim that the replicas divide."""
    return next((dim for dim, axes in enumerate(spec) if axes == DATA), None)


def share_sharding(value: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding of the shares of an array; None where it stays replicated."""
    dim = None if _is_key(value) else share_dim(jnp.shape(value), mesh.shape[DATA])
    return None if dim is None else NamedSharding(mesh, share_spec(dim))


def _is_key(leaf: Any) -> bool:
    """Returns whether an array, or what stands for one, is of random keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.extended)
