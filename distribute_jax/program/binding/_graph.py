"""One walk through the objects that a step reaches: variables, modules, arrays, static values."""

from __future__ import annotations

import array
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._internals import HIDDEN_ATTRIBUTES
from distribute_jax._values import DistributedValues
from distribute_jax.program.binding._attributes import Attributes, function_of, is_whole
from distribute_jax.program.binding._capture import (
    attribute_names,
    codes,
    function_behind,
    global_names,
    is_library,
    reads_any_attribute,
    roots,
)
from distribute_jax.program.binding._keys import mapping_key, opaque_key, plain_key
from distribute_jax.program.binding._place import Attribute, Context, Fixed, Item, Member, Place
from distribute_jax.program.binding._watch import Watch

_LARGE = 65536
"""Bytes."""

_PLAIN = (str, bytes, bool, int, float, complex, type(None), enum.Enum, np.generic, np.dtype)
_SEQUENCES = (list, set, deque, bytearray, array.array)
_CONTAINERS = (dict, types.MappingProxyType, tuple, frozenset, *_SEQUENCES)


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
    statics: dict[str, Any] = field(default_factory=dict)
    """Path and value of every static number or text, for the message about recompilation."""
    watch: Watch = field(default_factory=Watch)
    """What must stay the same objects for all of this to stay true."""


class Walker:
    """Walks from roots to everything reachable, building a hashable key of the structure."""

    def __init__(self, step_codes: Iterable[types.CodeType], used: Attributes) -> None:
        """Starts from the code of the step; ``used`` says what of an object counts, and grows."""
        self.graph = Graph()
        self._used = used
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []
        self._read(step_codes)

    def visit_root(self, value: Any, name: str, place: Place | None) -> Any:
        """Walks a value that the step reaches directly."""
        return self.visit(value, name, place or Fixed(value))

    def visit(self, value: Any, name: str, place: Place) -> Any:
        """Walks one value and returns its key; ``place`` is where it was found."""
        if isinstance(value, _PLAIN):
            self.graph.statics[name] = value
            return plain_key(value)
        if isinstance(value, jax.Array) or (place.can_set and _is_large_data(value)):
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
            self.graph.watch.bytes_of(value)
        if isinstance(value, nnx.State):
            return (nnx.State, self._table(value.raw_mapping, name))
        if isinstance(value, _CONTAINERS):
            return self._container(value, name, place)
        if isinstance(value, (ContextVar, weakref.ref)):
            return self._reference(value, name)
        if callable(value) and not isinstance(value, type):
            return self._callable(value, name)
        return self._object(value, name)

    def _variable(self, variable: nnx.Variable[Any], name: str) -> Any:
        self.graph.variables.append(variable)
        self.graph.names.append(name)
        raw = variable.get_raw_value()
        metadata = tuple(
            (key, mapping_key(value)) for key, value in sorted(variable.get_metadata().items())
        )
        if isinstance(raw, (jax.Array, np.ndarray, np.generic)):
            return (type(variable), metadata, raw.shape, raw.dtype)
        return (type(variable), metadata, jax.tree.structure(raw))

    def _node(self, node: Any, name: str) -> Any:
        self.graph.nodes.append(node)
        self.graph.node_names.append(name)
        table = vars(node)
        self.graph.watch.contents(table.values())
        children = tuple(
            (key, self.visit(child, _attribute(name, key), Item(table, key)))
            for key, child in sorted(table.items())  # Flax reorders the table at will
            if key not in HIDDEN_ATTRIBUTES
        )
        return (type(node), children, self._class(type(node), name, every=True))

    def _container(self, value: Any, name: str, place: Place) -> Any:
        if isinstance(value, (dict, types.MappingProxyType)):
            return (type(value), self._table(value, name))
        if isinstance(value, _SEQUENCES):
            return self._sequence(value, name)
        items = tuple(value)
        members = [
            Member(place, i) if items is value else Fixed(items[i]) for i in range(len(items))
        ]
        return (type(value), *map(self.visit, items, _indexed(name, items), members))

    def _reference(self, value: Any, name: str) -> Any:
        if isinstance(value, weakref.ref):
            return (weakref.ref, self.visit(value(), f"{name}()", Fixed(value())))
        self.graph.watch.context_variable(value)
        held = Context(value)
        return (opaque_key(value), self.visit(held.get(), f"{name}.get()", held))

    def _table(self, table: Any, name: str) -> Any:
        self.graph.watch.table(table)
        settable = isinstance(table, dict)
        return tuple(
            (
                mapping_key(key),
                self.visit(
                    child, f"{name}[{key!r}]", Item(table, key) if settable else Fixed(child)
                ),
            )
            for key, child in list(table.items())
        )

    def _sequence(self, value: Any, name: str) -> Any:
        self.graph.watch.contents(value)
        items = list(value)
        settable = isinstance(value, (list, deque))
        places = [Item(value, i) if settable else Fixed(item) for i, item in enumerate(items)]
        return (type(value), *map(self.visit, items, _indexed(name, items), places))

    def _callable(self, value: Any, name: str) -> Any:
        if is_library(getattr(value, "__module__", None)) and not _wraps_user_code(value):
            return opaque_key(value)
        if isinstance(value, functools.partial):
            self.graph.watch.attribute(value, "args")
            self.graph.watch.table(value.keywords)
        found = roots(value, named=True)
        self._read(codes(value))
        own = self._object(value, name) if found.values and found.values[0] is value else None
        reached = tuple(
            self.visit(child, child_name, place)
            for child, child_name, place in zip(
                found.values, found.names or (), found.places or (), strict=True
            )
            if child is not value
        )
        return (tuple(found.key), own, reached, self._function(function_behind(value), name))

    def _function(self, function: types.FunctionType | None, name: str) -> Any:
        """Watches the globals and cells of a function, and walks attributes set on it."""
        if function is None:
            return None
        self.graph.watch.cells(function.__closure__ or ())
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            self.graph.watch.attribute(function, part)
        scope = function.__globals__
        for key in global_names(function.__code__):
            if key in scope and not isinstance(scope[key], jax.Array):
                self.graph.watch.item(scope, key)
        table = vars(function)
        return self._items(table, [key for key in table if key in self._used.names], name)

    def _object(self, value: Any, name: str) -> Any:
        if isinstance(value, DistributedValues):
            return opaque_key(value)
        if isinstance(value, type):
            return (value, self._class(value, name, every=False, makes=True))
        home = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
        whole = is_whole(value)
        if is_library(home) and not whole:
            return opaque_key(value)
        table = self._used.table_of(value)
        if not isinstance(value, types.ModuleType):
            self.graph.watch.containers.append(table)
        children = self._items(table, self._used.of_table(table, whole=whole), name)
        slots = []
        for key in self._used.without_table(value):
            self.graph.watch.attribute(value, key)
            held = Attribute(value, key)
            slots.append((key, self.visit(held.get(), f"{name}.{key}", held)))
        return (type(value), children, tuple(slots), self._class(type(value), name, every=False))

    def _items(self, table: dict[str, Any], keys: Iterable[str], name: str) -> Any:
        found = []
        for key in keys:
            if not isinstance(table[key], jax.Array):
                self.graph.watch.item(table, key)
            found.append((key, self.visit(table[key], _attribute(name, key), Item(table, key))))
        return tuple(found)

    def _class(self, cls: type, name: str, *, every: bool, makes: bool = False) -> Any:
        """Walks the methods and class attributes that a step may use, in the user's classes only."""
        found = []
        for owner, key, member in self._used.of_class(cls, every=every, makes=makes):
            self.graph.watch.class_item(owner, key)
            function = function_of(member)
            if function is not None:
                found.append(self.visit(function, f"{name}.{key}", Fixed(function)))
            elif self._used.is_data(key, member):
                found.append(self.visit(member, f"{name}.{key}", Attribute(owner, key)))
        return tuple(found)

    def _read(self, found: Iterable[types.CodeType]) -> None:
        """Notes which attribute names a piece of code uses."""
        for code in found:
            self._used.names.update(attribute_names(code))
            self._used.any = self._used.any or reads_any_attribute(code)


def _is_large_data(value: Any) -> bool:
    """Tells whether a NumPy array is too large to be compared at each call, so it is an input."""
    return isinstance(value, np.ndarray) and value.nbytes > _LARGE and value.dtype.kind in "fiub"


def _wraps_user_code(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return True
    inner = getattr(value, "__wrapped__", None)
    return inner is not None and not is_library(getattr(inner, "__module__", None))


def _indexed(name: str, items: Any) -> list[str]:
    return [f"{name}[{i}]" for i in range(len(items))]


def _attribute(owner: str, key: str) -> str:
    return f"{owner}[{key}]" if key.isdigit() else f"{owner}.{key}"
