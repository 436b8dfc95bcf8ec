"""The sharding of each leaf of state between steps.

A leaf that the replicas divide is sharded along its first dim that is a multiple of their number: shares are
contiguous then, so that collectives need no transposed copies. A short first dim may be that of stacked
layers that a scan goes over, so it is the last choice. A leaf without such a dim is replicated: padding would
change what optax transformations compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA, SHARD, mirrored_sharding, share_axis, state_mesh
from distribute_jax._messages import listed
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._placement_rules import Axes, Rules

LEAST_ELEMENTS = 1024
"""Smaller arrays are replicated: collectives would cost more than the memory is worth."""

MOST_LAYERS = 128
"""A smaller first dim may be that of stacked layers."""


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


Path = tuple[Any, ...]
"""The keys from a model to one of its variables."""


@dataclass(frozen=True)
class ParameterDevice:
    """The single device that stores state between steps."""

    device: jax.Device
    memory_kind: str | None = None
    """As ``device.addressable_memories()`` names it; None for the device's default memory."""

    @property
    def state(self) -> SingleDeviceSharding:
        """The sharding of variables."""
        return SingleDeviceSharding(self.device, memory_kind=self.memory_kind)

    @property
    def results(self) -> SingleDeviceSharding:
        """The sharding of mirrored results: memory that any computation can read."""
        return SingleDeviceSharding(self.device)


@dataclass(frozen=True)
class Replicas:
    """The devices of a strategy's replicas, and the shardings of state between steps."""

    mesh: Mesh
    parameter_device: ParameterDevice | None = None
    """None if state is stored on the mesh."""
    shared: tuple[type[nnx.Variable[Any]], ...] = ()
    """The types of variables that the replicas divide."""
    rules: Rules | None = None
    """The rules that divide the model over the devices of each replica."""
    strategy: str = "Strategy"
    """The name of the strategy, for messages."""
    shard_over: int | None = None
    """How many consecutive devices divide the state; None for all."""
    reshard_after_forward: bool | None = None
    """Whether parameters are gathered again for the backward pass, as in ``FullyShardedStrategy``."""
    optimizer_memory_kind: str | None = None
    """Where optimizer state is between steps; None for the devices' default memory."""

    @functools.cached_property
    def state_mesh(self) -> Mesh:
        """The mesh that divides state."""
        return state_mesh(self.mesh, self.shard_over)

    @property
    def state(self) -> Sharding:
        """The sharding of state that is not divided."""
        if self.parameter_device is not None:
            return self.parameter_device.state
        return mirrored_sharding(self.mesh)

    @property
    def divides_arguments(self) -> bool:
        """Whether state among the arguments of a step, such as a ``TrainState``, may be divided."""
        return nnx.Variable in self.shared or self.rules is not None

    def shardings(
        self, variables: Sequence[nnx.Variable[Any]], paths: Callable[[], Sequence[Path]]
    ) -> tuple[NamedSharding | None, ...]:
        """Returns the sharding of each leaf; None if it is replicated."""
        if not self.shared and self.rules is None and self.optimizer_memory_kind is None:
            return (None,) * sum(len(jax.tree.leaves(v.get_raw_value())) for v in variables)
        keys = paths()
        rows = self.rows(variables, keys)
        leaves = [(v, leaf) for v in variables for leaf in jax.tree.leaves(v.get_raw_value())]
        kinds = [self._memory_kind(v, jnp.shape(leaf)) for v, leaf in leaves]
        wanted = tuple(
            NamedSharding(self.state_mesh, row.spec, memory_kind=kind) if row.spec or kind else None
            for row, kind in zip(rows, kinds, strict=True)
        )
        if any(isinstance(v, nnx.Param) for v in variables):
            self._check_divides(
                [row for row, of in zip(rows, leaves, strict=True) if not self._kept_whole(*of)]
            )
            if self.rules is not None:
                pairs = zip(leaves, wanted, strict=True)
                placed = [_is_placed(leaf, to) for (_, leaf), to in pairs if to is not None]
                self.rules.check_matched(variables, list(map(path_text, keys)), placed)
        return wanted

    def rows(
        self, variables: Sequence[nnx.Variable[Any]], paths: Sequence[Path]
    ) -> list[PlacedLeaf]:
        """Returns the placement of each leaf.

        Optimizer state is divided as its parameter: the one whose path is a suffix of its path.
        """
        pairs = list(zip(variables, paths, strict=True))
        of_model = {path: v for v, path in pairs if not isinstance(v, nnx.OptState)}
        return [
            self._row(path, variable, leaf, of_model)
            for variable, path in pairs
            for leaf in jax.tree.leaves(variable.get_raw_value())
        ]

    def _row(
        self,
        path: Path,
        variable: nnx.Variable[Any],
        leaf: Any,
        of_model: Mapping[Path, nnx.Variable[Any]],
    ) -> PlacedLeaf:
        shape = tuple(jnp.shape(leaf))
        axes, why = self._model_axes(path, variable, shape, of_model)
        kind = self._memory_kind(variable, shape)

        def row(reason: str, dim: int | None = None) -> PlacedLeaf:
            spec = [
                share_axis(self.state_mesh) if i == dim else of_dim for i, of_dim in enumerate(axes)
            ]
            while spec and spec[-1] is None:
                spec.pop()
            reason += f", in {kind}" if kind else ""
            return PlacedLeaf(path_text(path), shape, PartitionSpec(*spec), reason)

        if reason := self._kept_whole(variable, leaf):
            return row(why or reason)
        dim = share_dim(shape, self._shares, axes)
        if dim is None:
            return row(why or f"no dim is a multiple of {self._shares}")
        groups = f" of {self.mesh.size}" if SHARD in self.state_mesh.axis_names else ""
        of_data = f"dim {dim} is divided among {self._shares}{groups} replicas"
        return row(f"{why}, {of_data}" if why else of_data, dim)

    def _memory_kind(self, variable: nnx.Variable[Any], shape: Sequence[int]) -> str | None:
        """Returns the memory kind of an array between steps; None for the devices' default memory."""
        is_moved = isinstance(variable, nnx.OptState) and prod(shape) >= LEAST_ELEMENTS
        return self.optimizer_memory_kind if is_moved else None

    @property
    def _shares(self) -> int:
        """The number of shares of a divided array."""
        return int(self.state_mesh.shape[share_axis(self.state_mesh)])

    def _kept_whole(self, variable: nnx.Variable[Any], leaf: Any) -> str:
        """Returns why the replicas do not divide a leaf of any shape; empty if they may."""
        if keeps_own_values(variable):
            return "each replica has its value"
        if not isinstance(variable, self.shared):
            return "mirrored"
        if isinstance(variable, nnx.metrics.MetricState):
            return "read on the host after each epoch"
        if _is_key(leaf):
            return "a random key"
        if self._shares == 1:
            return "the data axis has size 1"
        small = moved_at_once(jnp.shape(leaf)) < LEAST_ELEMENTS
        return f"less than {LEAST_ELEMENTS} elements" if small else ""

    def _model_axes(
        self,
        path: Path,
        variable: nnx.Variable[Any],
        shape: tuple[int, ...],
        of_model: Mapping[Path, nnx.Variable[Any]],
    ) -> tuple[Axes, str]:
        whole: Axes = (None,) * len(shape)
        if self.rules is None or keeps_own_values(variable):
            return whole, ""
        if isinstance(variable, nnx.OptState):
            path = next((path[i:] for i in range(len(path)) if path[i:] in of_model), ())
            if not path:
                return whole, ""
            variable = of_model[path]
            if shape not in map(jnp.shape, jax.tree.leaves(variable.get_raw_value())):
                return whole, ""
        return self.rules.axes(path_text(path), variable, shape)

    def _check_divides(self, rows: Sequence[PlacedLeaf]) -> None:
        """Raises ArgumentError if parameters should be divided and none can be."""
        if not rows or nnx.Variable not in self.shared or any(row.spec for row in rows):
            return
        rows = sorted(rows, key=lambda row: -prod(row.shape))
        raise ArgumentError(
            _NOTHING.format(
                strategy=self.strategy,
                replicas=self._shares,
                lines=listed([f"{row.path}: {list(row.shape)}" for row in rows]),
                instead=_BY_RULES if self.rules is not None else _WHOLE,
            )
        )


def path_text(path: Sequence[Any]) -> str:
    """Returns the path of a variable as it is written in Python, as ``blocks[0].kernel``."""
    text = "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path
    )
    return text.removeprefix(".")


_NOTHING = """\
{strategy} can divide none of the parameters among {replicas} replicas:
{lines}
One dim of an array must be a multiple of the number of replicas. Use fewer devices, or widths that are \
multiples of {replicas}; {instead}."""
_WHOLE = "shard_over=k divides it among k devices; dj.MirroredStrategy() keeps the whole model on each device"
_BY_RULES = "fully_sharded=False divides by the rules alone"


def moved_at_once(shape: Sequence[int]) -> int:
    """Returns how many elements one all-gather moves: of stacked layers, those of one layer."""
    return prod(shape[1:] if len(shape) > 2 and shape[0] < MOST_LAYERS else shape)


def share_dim(shape: Sequence[int], replicas: int, axes: Axes = ()) -> int | None:
    """Returns the dim along which the replicas divide an array; None if it is replicated.

    It is not one that ``axes`` of the mesh divide already.
    """
    divided = [dim for dim, of_dim in enumerate(axes) if of_dim is not None]
    fits = [
        dim
        for dim, size in enumerate(shape)
        if size and size % replicas == 0 and dim not in divided
    ]
    if replicas == 1 or not fits or moved_at_once(shape) < LEAST_ELEMENTS:
        return None
    layers = shape[0] < MOST_LAYERS
    return min(fits, key=lambda dim: (layers and dim == 0, dim))


def share_spec(dim: int | None, axes: Any = DATA) -> PartitionSpec:
    """Returns the spec of an array that is divided along a dim; None for no dim."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes)


def data_dim(spec: PartitionSpec) -> int | None:
    """Returns the dim that the replicas divide; None without one."""
    return next((dim for dim, axes in enumerate(spec) if axes in {DATA, SHARD}), None)


def variable_paths(
    variables: Sequence[nnx.Variable[Any]], names: Sequence[str], nodes: Iterable[Any]
) -> list[Path]:
    """Returns the path of each variable in the outermost module that holds it, or its name."""
    paths: dict[int, Path] = {}
    seen: set[int] = set()
    for node in nodes:
        if id(node) not in seen:
            for path, value in nnx.iter_graph(node):
                seen.add(id(value))
                if isinstance(value, nnx.Variable):
                    paths.setdefault(id(value), path)
    return [
        paths.get(id(variable), (name,)) for variable, name in zip(variables, names, strict=True)
    ]


def modules_of(nest: Any) -> dict[Path, Any]:
    """Returns the outermost modules of a pytree, by the keys that lead to them."""
    pairs = jax.tree.leaves_with_path(nest, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    keys = [[getattr(k, "key", getattr(k, "idx", None)) for k in path] for path, _ in pairs]
    return {
        tuple(of): x for of, (_, x) in zip(keys, pairs, strict=True) if isinstance(x, nnx.Pytree)
    }


def share_sharding(value: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding of an array that the replicas divide; None if it is replicated."""
    axis = share_axis(mesh)
    dim = None if _is_key(value) else share_dim(jnp.shape(value), mesh.shape[axis])
    return None if dim is None else NamedSharding(mesh, share_spec(dim, axis))


def _is_placed(leaf: Any, wanted: NamedSharding) -> bool:
    """True if an array has the wanted sharding already."""
    is_plan = isinstance(wanted.mesh, AbstractMesh) or isinstance(leaf, jax.core.Tracer)
    there = None if is_plan else getattr(leaf, "sharding", None)
    return there is not None and there.is_equivalent_to(wanted, len(leaf.shape))


def _is_key(leaf: Any) -> bool:
    """True for an array of random keys, also an abstract one."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.extended)
