"""One walk through the objects that a step reaches: variables, modules, arrays, static values."""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from distribute_jax._internals import HIDDEN_ATTRIBUTES
from distribute_jax._values import DistributedValues
from distribute_jax.program._capture import (
    attribute_names,
    codes,
    global_names,
    is_library,
    roots,
)
from distribute_jax.program._place import Fixed, Item, Member, Place

_LARGE = 65536
"""Bytes."""

_PLAIN = (str, bytes, bool, int, float, complex, type(None), enum.Enum, np.generic, np.dtype)


@dataclass(eq=False)
class Graph:
    """What the walk found, in the order found."""

    variables: list[nnx.Variable[Any]] = field(default_factory=list)
    """Every variable, once."""
    names: list[str] = field(default_factory=list)
    """The path of each variable, as the user would write it."""
    nodes: list[Any] = field(default_factory=list)
    """Every NNX module, optimizer, metric and stream, once."""
    node_names: list[str] = field(default_factory=list)
    """The path of each node."""
    arrays: list[tuple[str, Place]] = field(default_factory=list)
    """Path and place of every captured ``jax.Array`` that is in no variable."""
    constants: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """Small NumPy arrays: they are constants of the program, compiled anew when they change."""
    tables: list[dict[Any, Any]] = field(default_factory=list)
    """Attribute tables of nodes, whose values must stay the same objects."""
    dicts: list[dict[Any, Any]] = field(default_factory=list)
    """Dicts whose keys and values must stay the same objects."""
    lists: list[list[Any]] = field(default_factory=list)
    """Lists whose items must stay the same objects."""
    picked: dict[tuple[int, str], dict[Any, Any]] = field(default_factory=dict)
    """Single attributes of plain objects, and single globals, that must stay the same objects."""
    cells: list[types.CellType] = field(default_factory=list)
    """Cells of helper functions, whose contents must stay the same objects."""
    statics: dict[str, Any] = field(default_factory=dict)
    """Path and value of every static number or text, for the message about recompilation."""


class Walker:
    """Walks from roots to everything reachable, building a hashable key of the structure."""

    def __init__(self, step_codes: Iterable[types.CodeType]) -> None:
        """Starts from the code of the step, whose attribute names say what of an object is used."""
        self.graph = Graph()
        self._mentioned: set[str] = set().union(*map(attribute_names, step_codes), ())
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []

    @property
    def mentioned(self) -> frozenset[str]:
        """Every attribute name that the code reached so far mentions."""
        return frozenset(self._mentioned)

    def mention(self, names: Iterable[str]) -> None:
        """Adds attribute names that count as used."""
        self._mentioned.update(names)

    def visit_root(self, value: Any, name: str, place: Place | None) -> Any:
        """Walks a value that the step reaches directly."""
        return self.visit(value, name, place or Fixed(value))

    def visit(self, value: Any, name: str, place: Place) -> Any:
        """Walks one value and returns its key; ``place`` is where it was found."""
        if isinstance(value, _PLAIN):
            self.graph.statics[name] = value
            return (type(value), value)
        if isinstance(value, jax.Array) or _is_large_data(value):
            self.graph.arrays.append((name, place))
            return "array"
        number = self._seen.get(id(value))
        if number is not None:
            return ("again", number)
        self._seen[id(value)] = len(self._seen)
        self._keep.append(value)
        return self._visit_new(value, name, place)

    def _visit_new(self, value: Any, name: str, place: Place) -> Any:
        if isinstance(value, nnx.Variable):
            return self._variable(value, name)
        if isinstance(value, nnx.Pytree):
            return self._node(value, name)
        if isinstance(value, np.ndarray):
            self.graph.constants.append(value)
        if isinstance(value, nnx.State):
            return (nnx.State, self._table(value.raw_mapping, name))
        if isinstance(value, dict):
            return (type(value), self._table(value, name))
        if isinstance(value, list):
            self.graph.lists.append(value)
            places = [Item(value, i) for i in range(len(value))]
            return (list, *map(self.visit, value, _indexed(name, value), places))
        if isinstance(value, (tuple, set, frozenset)):
            items = tuple(value)
            members = [
                Member(place, i) if items is value else Fixed(items[i]) for i in range(len(items))
            ]
            return (type(value), *map(self.visit, items, _indexed(name, items), members))
        if callable(value) and not isinstance(value, type):
            return self._callable(value, name)
        return self._object(value, name)

    def _variable(self, variable: nnx.Variable[Any], name: str) -> Any:
        self.graph.variables.append(variable)
        self.graph.names.append(name)
        raw = variable.get_raw_value()
        if isinstance(raw, (jax.Array, np.ndarray, np.generic)):
            return (type(variable), raw.shape, raw.dtype)
        return (type(variable), jax.tree.structure(raw))

    def _node(self, node: Any, name: str) -> Any:
        self.graph.nodes.append(node)
        self.graph.node_names.append(name)
        table = vars(node)
        self.graph.tables.append(table)
        children = tuple(
            (key, self.visit(child, _attribute(name, key), Item(table, key)))
            for key, child in sorted(table.items())  # Flax reorders the table at will
            if key not in HIDDEN_ATTRIBUTES
        )
        return (type(node), children, self._methods(type(node), name, every=True))

    def _table(self, table: Any, name: str) -> Any:
        self.graph.dicts.append(table)
        return tuple(
            (_hashable(key), self.visit(child, f"{name}[{key!r}]", Item(table, key)))
            for key, child in list(table.items())
        )

    def _callable(self, value: Any, name: str) -> Any:
        if is_library(getattr(value, "__module__", None)) and not _wraps_user_code(value):
            return _identity(value)
        found = roots(value, named=True)
        self.mention(name for code in codes(value) for name in attribute_names(code))
        self._watch_globals(value)
        own = self._object(value, name) if found.values and found.values[0] is value else None
        reached = tuple(
            self.visit(child, child_name, place)
            for child, child_name, place in zip(
                found.values, found.names or (), found.places or (), strict=True
            )
            if child is not value
        )
        return (tuple(found.key), own, reached)

    def _watch_globals(self, value: Any) -> None:
        function = inspect.unwrap(value)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            return
        self.graph.cells += function.__closure__ or ()
        scope = function.__globals__
        for name in global_names(function.__code__):
            if name in scope and not isinstance(scope[name], jax.Array):
                self.graph.picked[id(scope), name] = scope

    def _object(self, value: Any, name: str) -> Any:
        if isinstance(value, (type, DistributedValues)):
            return _identity(value)
        home = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
        whole = not jax.tree_util.all_leaves([value])  # a pytree, such as Flax's TrainState
        if not hasattr(value, "__dict__") or (is_library(home) and not whole):
            return _identity(value)
        table = vars(value)
        used = [key for key in table if whole or key in self._mentioned]
        for key in used:
            if not isinstance(table[key], jax.Array):
                self.graph.picked[id(table), key] = table
        children = tuple(
            (key, self.visit(table[key], _attribute(name, key), Item(table, key))) for key in used
        )
        return (type(value), children, self._methods(type(value), name, every=False))

    def _methods(self, cls: type, name: str, *, every: bool) -> Any:
        found = []
        for owner in cls.__mro__:
            if is_library(owner.__module__):
                continue
            for key, member in list(vars(owner).items()):
                function = _function_of(member)
                if function and (every or key in self._mentioned or key == "__call__"):
                    found.append(self.visit(function, f"{name}.{key}", Fixed(function)))
        return tuple(found)


def _is_large_data(value: Any) -> bool:
    """Tells whether a NumPy array is too large to be compared at each call, so it is an input."""
    return isinstance(value, np.ndarray) and value.nbytes > _LARGE and value.dtype.kind in "fiub"


def _function_of(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, types.FunctionType) else None


def _wraps_user_code(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return True
    inner = getattr(value, "__wrapped__", None)
    return inner is not None and not is_library(getattr(inner, "__module__", None))


def _indexed(name: str, items: Any) -> list[str]:
    return [f"{name}[{i}]" for i in range(len(items))]


def _attribute(owner: str, key: str) -> str:
    return f"{owner}[{key}]" if key.isdigit() else f"{owner}.{key}"


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        return id(key)
    return key


@dataclass(frozen=True, eq=False)
class Identity:
    """A key part for a value that is only equal to itself; it keeps the value alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Compares the values held, by identity."""
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        """Hashes the identity of the value held."""
        return id(self.value)


def _identity(value: Any) -> Any:
    """Keys an opaque value: by equality where it defines one, else by identity."""
    if isinstance(value, np.ndarray):
        return ("ndarray", value.shape, str(value.dtype), hash(value.tobytes()))
    if cast("Any", type(value)).__hash__ in (None, object.__hash__) or isinstance(
        value, types.FunctionType
    ):
        return Identity(value)
    try:
        hash(value)
    except TypeError:
        return Identity(value)
    return (type(value), value)
