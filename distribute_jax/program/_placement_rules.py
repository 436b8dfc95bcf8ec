"""Rules that divide the arrays of a model over the mesh axes of one replica, by path or by logical axis."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA, MODEL
from distribute_jax._messages import listed

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
        for key, value in rules.items():
            if not isinstance(key, str) or not isinstance(value, (PartitionSpec, str, type(None))):
                raise ArgumentError(
                    f"{strategy}: a rule maps a str to a PartitionSpec, an axis or None; got {key!r}: "
                    f"{value!r}."
                )
            if isinstance(value, PartitionSpec) and (value.unreduced or value.reduced):
                raise ArgumentError(
                    f"{strategy}: the rule {key!r} must only divide dims; got {value!r}."
                )
            value = self._on_cores(value)
            if isinstance(value, PartitionSpec):
                try:
                    re.compile(key)
                except (re.error, OverflowError, RecursionError) as error:
                    raise ArgumentError(
                        f"{strategy}: the rule {key!r} is not a regular expression: {error}."
                    ) from error
                self._patterns[key] = tuple(value)
            else:
                self._logical[key] = value
            axes = tuple(value) if isinstance(value, PartitionSpec) else (value,)
            self._check_axes(key, axes, strategy)

    def _on_cores(self, value: Any) -> Any:
        """Expands ``"model"`` to all mesh axes of one replica, if there are several."""
        cores = tuple(name for name in self._mesh.axis_names if name.startswith(MODEL))
        if cores == (MODEL,):
            return value
        if isinstance(value, PartitionSpec):
            return PartitionSpec(*(cores if of_dim == MODEL else of_dim for of_dim in value))
        return cores if value == MODEL else value

    def _check_axes(self, key: str, axes: Sequence[Any], strategy: str) -> None:
        for of_dim in axes:
            if not isinstance(of_dim, (str, tuple, type(None))):
                raise ArgumentError(
                    f"{strategy}: the rule {key!r} must have an axis, a tuple of axes or None for each dim; "
                    f"got {of_dim!r}."
                )
        known = [name for name in self._mesh.axis_names if name != DATA]
        names = [name for dim in axes for name in names_of(dim)]
        for name in names:
            if name == DATA:
                raise ArgumentError(
                    f"{strategy}: the rule {key!r} names 'data', the axis of the replicas, which the "
                    "strategy divides by itself (fully_sharded=True). Rules name 'model'."
                )
            if name not in known:
                raise ArgumentError(
                    f"{strategy}: the rule {key!r} names the axis {name!r}; the axes are {known}."
                )
        if len(set(names)) < len(names):
            raise ArgumentError(f"{strategy}: the rule {key!r} uses one axis for two dims: {axes}.")

    def axes(
        self, path: str, variable: nnx.Variable[Any], shape: Sequence[int]
    ) -> tuple[Axes, str]:
        """Returns the axes of an array, and the rule that decided."""
        if not (rules := self._matching(path, variable)):
            return (None,) * len(shape), ""
        if (spec := self._patterns.get(rules[0])) is None:
            spec = tuple(map(self._logical.get, logical_axes(variable)))
        text = ", ".join(map(repr, rules))
        return self._aligned(path, spec, shape, text), f"rule {text}"

    def _matching(self, path: str, variable: nnx.Variable[Any]) -> list[str]:
        """Returns the rules for a variable: the first pattern that matches, or those of its logical axes."""
        pattern = next((pattern for pattern in self._patterns if re.search(pattern, path)), None)
        if pattern is not None:
            return [pattern]
        return [name for name in logical_axes(variable) if name in self._logical]

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
        return math.prod(self._mesh.shape[name] for name in names_of(of_dim))

    def check_matched(
        self, variables: Sequence[nnx.Variable[Any]], paths: Sequence[str], placed: Sequence[bool]
    ) -> None:
        """Raises ArgumentError for a rule that matches no variable, which was renamed or the rule misspelled.

        A step may reach only a part of a model; then all divided variables were ``placed`` before.
        """
        pairs = zip(paths, variables, strict=True)
        matched = {rule for path, variable in pairs for rule in self._matching(path, variable)}
        unused = [rule for rule in (*self._patterns, *self._logical) if rule not in matched]
        if unused and not (all(placed) and (placed or matched)):
            lines = []
            for rule in unused:
                near = difflib.get_close_matches(re.sub(r"[\\^$]", "", rule), paths, 3, 0.3)
                lines.append(f"{rule!r}; the nearest are {', '.join(near or paths[:3])}")
            raise ArgumentError(_UNUSED.format(lines=listed(lines)))


_UNUSED = """\
These rules match no variable of the model, so what they should divide would be replicated:
{lines}
A rule is a regular expression that is searched in the path of a variable, or a logical axis name of Flax. \
strategy.placement(model) shows all paths; remove the rule if the model has no such part."""


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
