"""The sharding of each leaf of state between steps.

A leaf that the replicas divide is sharded along its first dim that is a multiple of their number: shares are
contiguous then, so that collectives need no transposed copies. A short first dim may be that of stacked
layers that a scan goes over, so it is the last choice. A leaf without such a dim is replicated: padding would
change what optax transformations compute. The user's rules divide arrays over the mesh axes of one replica.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import defaultdict
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
from distribute_jax._mesh import DATA, MODEL, SHARD, mirrored_sharding, share_axis, state_mesh
from distribute_jax._messages import listed
from distribute_jax.program._aggregation import keeps_own_values

LEAST_ELEMENTS = 1024
"""Smaller arrays are replicated: collectives would cost more than the memory is worth."""

MOST_LAYERS = 128
"""A smaller first dim may be that of stacked layers."""


Axes = tuple[Any, ...]
"""For each dim of an array, the mesh axes that divide it: None, a name, or a tuple of names."""


class Rules:
    """The user's rules: regular expressions for paths of variables, and names of logical axes."""

    def __init__(self, rules: Any, mesh: Mesh, strategy: str) -> None:
        """Checks the rules against the mesh."""
        if not isinstance(rules, Mapping) or not rules:
            raise ArgumentError(
                f"{strategy}: rules must be a non-empty dict, as {{'kernel': PartitionSpec(None, 'model')}}; "
                f"got {rules!r:.80}."
            )
        self._mesh = mesh
        self._patterns: dict[str, Axes] = {}
        self._logical: dict[str, Any] = {}
        self._matched: set[str] = set()
        """The rules that have matched a variable of any model."""
        for key, value in rules.items():
            if not isinstance(key, str) or not isinstance(value, (PartitionSpec, str, type(None))):
                raise ArgumentError(
                    f"{strategy}: a rule maps a str to a PartitionSpec, an axis or None; got {key!r}: "
                    f"{value!r}."
                )
            if why := self._add(key, value):
                raise ArgumentError(f"{strategy}: the rule {key!r} {why}.")

    def _add(self, key: str, value: Any) -> str:
        """Adds a rule, with ``"model"`` expanded to all mesh axes of one replica; returns what is wrong."""
        cores = tuple(name for name in self._mesh.axis_names if name.startswith(MODEL))
        model: Any = MODEL if cores == (MODEL,) else cores
        if not isinstance(value, PartitionSpec):
            self._logical[key] = model if value == MODEL else value
            return self._wrong_axes((self._logical[key],))
        if value.unreduced or value.reduced:
            return f"must only divide dims; got {value!r}"
        self._patterns[key] = tuple(model if of_dim == MODEL else of_dim for of_dim in value)
        try:
            re.compile(key)
        except (re.error, OverflowError, RecursionError) as error:
            return f"is not a regular expression: {error}"
        return self._wrong_axes(self._patterns[key])

    def _wrong_axes(self, axes: Axes) -> str:
        """Returns why the mesh cannot divide dims along these axes; empty if it can."""
        for of_dim in axes:
            if not isinstance(of_dim, (str, tuple, type(None))):
                return f"must have an axis, a tuple of axes or None for each dim; got {of_dim!r}"
        known = [name for name in self._mesh.axis_names if name != DATA]
        names = [name for dim in axes for name in names_of(dim)]
        if DATA in names:
            return (
                "names 'data', the axis of the replicas, which the strategy divides by itself "
                "(fully_sharded=True). Rules name 'model'"
            )
        if unknown := [name for name in names if name not in known]:
            return f"names the axis {unknown[0]!r}; the axes are {known}"
        return f"uses one axis for two dims: {axes}" if len(set(names)) < len(names) else ""

    def axes(self, path: str, variable: Any, shape: Sequence[int]) -> tuple[Axes, str]:
        """Returns the axes of an array, and the rule that decided."""
        if not (rules := self._matching(path, variable)):
            return (None,) * len(shape), ""
        if (spec := self._patterns.get(rules[0])) is None:
            spec = tuple(map(self._logical.get, logical_axes(variable)))
        text = ", ".join(map(repr, rules))
        return self._aligned(path, spec, shape, text), f"rule {text}"

    def _matching(self, path: str, variable: nnx.Variable[Any]) -> list[str]:
        """Returns the rules for a variable: the first pattern that matches, or those of its logical axes."""
        patterns = [pattern for pattern in self._patterns if re.search(pattern, path)][:1]
        return patterns or [name for name in logical_axes(variable) if name in self._logical]

    def _aligned(self, path: str, spec: Axes, shape: Sequence[int], rule: str) -> Axes:
        """Returns a spec aligned with the last dims, since stacked layers have more in front."""
        if len(spec) > len(shape):
            raise ArgumentError(
                f"The rule {rule} has {len(spec)} dims, and {path} has the shape {list(shape)}."
            )
        axes = (*(None,) * (len(shape) - len(spec)), *spec)
        names = [name for dim in axes for name in names_of(dim)]
        if len(set(names)) < len(names):
            twice = [dim for dim, of_dim in enumerate(axes) if of_dim is not None]
            raise ArgumentError(
                f"The rules {rule} divide the dims {twice} of {path}, {list(shape)}, along one axis: {axes}. "
                "An axis divides one dim."
            )
        for dim, of_dim in enumerate(axes):
            size = self._size(of_dim)
            if shape[dim] % size:
                raise ArgumentError(
                    f"The rule {rule} divides dim {dim} of {path}, {list(shape)}, among {size} devices "
                    f"({of_dim!r}), and {shape[dim]} is not a multiple of {size}."
                )
        return tuple(of_dim if self._size(of_dim) > 1 else None for of_dim in axes)

    def _size(self, of_dim: Any) -> int:
        return prod(self._mesh.shape[name] for name in names_of(of_dim))

    def check_matched(
        self, variables: Sequence[nnx.Variable[Any]], paths: Sequence[str], placed: Sequence[bool]
    ) -> None:
        """Raises ArgumentError for a rule that matches no variable, which was renamed or the rule misspelled.

        The model that it is for may have been placed before, and this may be another, or arrays beside it.
        A step may reach only a part of a model; then all divided variables were ``placed`` before.
        """
        pairs = zip(paths, variables, strict=True)
        matched = {rule for path, variable in pairs for rule in self._matching(path, variable)}
        self._matched |= matched
        unused = [rule for rule in (*self._patterns, *self._logical) if rule not in self._matched]
        if unused and not (all(placed) and (placed or matched)):
            lines = [f"{rule!r}; {self._why_unused(rule, variables, paths)}" for rule in unused]
            raise ArgumentError(_UNUSED.format(lines=listed(lines)))

    def _why_unused(
        self, rule: str, variables: Sequence[nnx.Variable[Any]], paths: Sequence[str]
    ) -> str:
        for path, variable in zip(paths, variables, strict=True):
            patterns = rule in self._patterns and re.search(rule, path)
            if patterns or rule in logical_axes(variable):
                earlier = self._matching(path, variable)[0]
                return f"the rule {earlier!r} decides about {path}: put this one before it"
        near = difflib.get_close_matches(re.sub(r"[\\^$]", "", rule), paths, 3, 0.3)
        is_logical = f"a logical axis, since its value is {self._logical.get(rule)!r}; "
        return (
            f"{is_logical * (rule in self._logical)}the nearest are {', '.join(near or paths[:3])}"
        )


_UNUSED = """\
These rules decide about no variable of the model, so what they should divide may be replicated:
{lines}
A rule with a PartitionSpec is a regular expression, of which the first that is found in the path of a \
variable decides; one with an axis or None is a logical axis name of Flax. \
strategy.placement(model) shows all paths; remove the rule if the model has no such part, \
or make the model first that has it."""


def names_of(of_dim: Any) -> tuple[str, ...]:
    """Returns the mesh axes that divide one dim."""
    if of_dim is None:
        return ()
    return (of_dim,) if isinstance(of_dim, str) else tuple(of_dim)


def logical_axes(variable: nnx.Variable[Any]) -> Axes:
    """Returns the logical axis names that Flax keeps with a variable."""
    names = variable.get_metadata().get("out_sharding")
    names = getattr(names, "spec", names)
    if not isinstance(names, (tuple, list, PartitionSpec)):
        return ()
    return tuple(name if isinstance(name, str) else None for name in names)


class PlainArray(nnx.Param[Any]):
    """An array outside of modules: a parameter, or what optax keeps of one."""


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
Model = Mapping[Path, Sequence[Any]]
"""The variables of one path: several models may have equal ones."""


@dataclass(frozen=True)
class ParameterDevice:
    """The single device that stores state between steps."""

    device: jax.Device
    memory_kind: str | None = None
    """As ``device.addressable_memories()`` names it; None for the device's default memory."""

    def state(self, shape: Sequence[int] = ()) -> SingleDeviceSharding:
        """Returns the sharding of an array of a variable; any computation can read a small one."""
        kind = self.memory_kind if prod(shape) >= LEAST_ELEMENTS else None
        return SingleDeviceSharding(self.device, memory_kind=kind)


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

    def state(self, shape: Sequence[int]) -> Sharding:
        """Returns the sharding of an array of state that is not divided."""
        if self.parameter_device is not None:
            return self.parameter_device.state(shape)
        return mirrored_sharding(self.mesh)

    @property
    def divides_arguments(self) -> bool:
        """Whether state among the arguments of a step, such as a ``TrainState``, may be divided."""
        return nnx.Variable in self.shared or self.rules is not None

    def shardings(
        self, variables: Sequence[nnx.Variable[Any]], paths: Callable[[], Sequence[Path]]
    ) -> tuple[NamedSharding | None, ...]:
        """Returns the sharding of each leaf; None if it is replicated."""
        leaves = [(v, leaf) for v in variables for leaf in jax.tree.leaves(v.get_raw_value())]
        if not self.shared and self.rules is None and self.optimizer_memory_kind is None:
            return (None,) * len(leaves)
        keys = paths()
        rows = self.rows(variables, keys)
        kinds = [self._memory_kind(v, jnp.shape(leaf)) for v, leaf in leaves]
        wanted = tuple(
            NamedSharding(self.state_mesh, row.spec, memory_kind=kind) if row.spec or kind else None
            for row, kind in zip(rows, kinds, strict=True)
        )
        if any(isinstance(v, nnx.Param) for v in variables):
            pairs = zip(rows, leaves, strict=True)
            self._check_divides([row for row, of in pairs if not self._kept_whole(*of)])
            if self.rules is not None:
                to = zip(leaves, wanted, strict=True)
                placed = [_is_placed(leaf, at) for (_, leaf), at in to if at is not None]
                self.rules.check_matched(variables, list(map(path_text, keys)), placed)
        return wanted

    def rows(self, variables: Sequence[Any], paths: Sequence[Path]) -> list[PlacedLeaf]:
        """Returns the placement of each leaf.

        Optimizer state is divided as its parameter: the one of its shape whose path is a suffix of its path.
        """
        pairs, model = list(zip(variables, paths, strict=True)), defaultdict[Path, list[Any]](list)
        for v, path in pairs:
            if not isinstance(v, nnx.OptState):
                model[path].append(v)
        return [
            self._row(path, v, leaf, model)
            for v, path in pairs
            for leaf in jax.tree.leaves(v.get_raw_value())
        ]

    def _row(self, path: Path, variable: Any, leaf: Any, model: Model) -> PlacedLeaf:
        shape, dim = tuple(jnp.shape(leaf)), None
        axes, why = self._model_axes(path, variable, shape, model)
        if reason := self._kept_whole(variable, leaf):
            why = why or reason
        elif (dim := share_dim(shape, self._shares, axes)) is None:
            why = why or f"no dim is a multiple of {self._shares}"
        else:
            groups = f" of {self.mesh.size}" if SHARD in self.state_mesh.axis_names else ""
            of_data = f"dim {dim} is divided among {self._shares}{groups} replicas"
            why = f"{why}, {of_data}" if why else of_data
        data = share_axis(self.state_mesh)
        spec = [data if i == dim else of_dim for i, of_dim in enumerate(axes)]
        while spec and spec[-1] is None:
            spec.pop()
        kind = self._memory_kind(variable, shape)
        why += f", in {kind}" if kind else ""
        return PlacedLeaf(path_text(path), shape, PartitionSpec(*spec), why)

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
        model: Model,
    ) -> tuple[Axes, str]:
        whole: Axes = (None,) * len(shape)
        if self.rules is None or keeps_own_values(variable):
            return whole, ""
        if isinstance(variable, nnx.OptState):
            path = next((path[i:] for i in range(len(path)) if path[i:] in model), ())
            if not (parameters := [v for v in model.get(path, ()) if _has_shape(v, shape)]):
                return whole, ""
            variable = parameters[0]
        try:
            return self.rules.axes(path_text(path), variable, shape)
        except ArgumentError:
            # Optax's state in a TrainState has the names of parameters, and factored moments other shapes.
            if isinstance(variable, PlainArray) and any(
                of[:1] != path[:1] and of[1:] == path[i:] and jnp.shape(v.get_raw_value()) != shape
                for i in range(2, len(path))
                for of, variables in model.items()
                for v in variables
            ):
                return whole, ""
            raise

    def _check_divides(self, rows: Sequence[PlacedLeaf]) -> None:
        """Raises ArgumentError if parameters should be divided and none can be."""
        if rows and nnx.Variable in self.shared and not any(row.spec for row in rows):
            rows = sorted(rows, key=lambda row: -prod(row.shape))
            lines = listed([f"{row.path}: {list(row.shape)}" for row in rows])
            facts = {"lines": lines, "instead": _WHOLE if self.rules is None else _BY_RULES}
            text = _NOTHING.format(strategy=self.strategy, replicas=self._shares, **facts)
            raise ArgumentError(text)


def path_text(path: Sequence[Any]) -> str:
    """Returns the path of a variable as it is written in Python, as ``blocks[0].kernel``."""
    text = "".join(f".{k}" if isinstance(k, str) and k.isidentifier() else f"[{k!r}]" for k in path)
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
    free = [of_dim is None for of_dim in axes] or [True] * len(shape)
    dims = [i for i, size in enumerate(shape) if size and size % replicas == 0 and free[i]]
    if replicas == 1 or not dims or moved_at_once(shape) < LEAST_ELEMENTS:
        return None
    layers = shape[0] < MOST_LAYERS
    return min(dims, key=lambda dim: (layers and dim == 0, dim))


def share_spec(dim: int | None, axes: Any = DATA) -> PartitionSpec:
    """Returns the spec of an array that is divided along a dim; None for no dim."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes)


def data_dim(spec: PartitionSpec) -> int | None:
    """Returns the dim that the replicas divide; None without one."""
    return next((dim for dim, axes in enumerate(spec) if axes in {DATA, SHARD}), None)


def variable_paths(
    variables: Sequence[nnx.Variable[Any]], names: Sequence[str], nodes: Iterable[Any]
) -> list[Path]:
    """Returns the path of each variable in the outermost module, or ``nnx.State``, that holds it."""
    paths: dict[int, Path] = {}
    seen: set[int] = set()
    for node in nodes:
        if id(node) not in seen:
            for path, value in nnx.iter_graph(node):
                seen.add(id(value))
                if isinstance(value, nnx.Variable):
                    paths.setdefault(id(value), path)
    return [paths.get(id(v)) or _keys(name) for v, name in zip(variables, names, strict=True)]


def _keys(name: str) -> Path:
    """Returns the keys to a variable that no module holds, below the argument or the captured object."""
    below = re.sub(r"^(kw)?args\[.*?\]|^\w+", "", name)
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", below)
    return tuple(int(i) if i else key or attribute for key, i, attribute in keys) or (name,)


def modules_of(nest: Any) -> dict[Path, Any]:
    """Returns the outermost modules of a pytree, by the keys that lead to them."""
    pairs = jax.tree.leaves_with_path(nest, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return {
        tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path): x
        for path, x in pairs
        if isinstance(x, nnx.Pytree)
    }


def share_sharding(value: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding of an array that the replicas divide; None if it is replicated."""
    axis = share_axis(mesh)
    dim = None if _is_key(value) else share_dim(jnp.shape(value), mesh.shape[axis])
    return None if dim is None else NamedSharding(mesh, share_spec(dim, axis))


def _has_shape(variable: nnx.Variable[Any], shape: tuple[int, ...]) -> bool:
    return shape in map(jnp.shape, jax.tree.leaves(variable.get_raw_value()))


def _is_placed(leaf: Any, wanted: NamedSharding) -> bool:
    """True if an array has the wanted sharding already."""
    is_plan = isinstance(wanted.mesh, AbstractMesh) or isinstance(leaf, jax.core.Tracer)
    there = None if is_plan else getattr(leaf, "sharding", None)
    return there is not None and there.is_equivalent_to(wanted, len(leaf.shape))


def _is_key(leaf: Any) -> bool:
    """True for an array of random keys, also an abstract one."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.extended)
