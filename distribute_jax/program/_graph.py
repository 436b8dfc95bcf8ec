"""Walks the objects that a step reaches and builds a hashable key of their structure."""

from __future__ import annotations

import enum
import functools
import gc
import operator
import re
import types
import weakref
from array import array
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from distribute_jax._absent import describe_foreign, is_foreign
from distribute_jax._errors import StaleCaptureError
from distribute_jax._jax_private import HIDDEN_ATTRIBUTES, read_metadata
from distribute_jax._messages import is_numeric
from distribute_jax._values import DistributedValues
from distribute_jax.program._capture import (
    AttributeNames,
    captures,
    function_behind,
    function_of,
    global_names,
    is_data,
    is_followed_whole,
    is_library,
    is_optax,
)
from distribute_jax.program._paths import (
    AttributePath,
    CapturePath,
    FixedValue,
    IdentityGuard,
    ItemPath,
    MemberPath,
)

_MAX_CONSTANT_BYTES = 65536
"""A captured NumPy array of more bytes is an input of the program, not a constant."""

_PLAIN_TYPES = (str, bytes, bool, int, float, complex, type(None), enum.Enum, np.generic, np.dtype)
_VIEWS: Any = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (dict, list, set, tuple, frozenset, *_VIEWS)
_GETTERS = (operator.attrgetter, operator.methodcaller)

_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)

_FOREIGN = (
    "The step gets {name}: {kind}. Its numbers would be read once, when the step is traced, and a later "
    "change would not be noticed. Pass arrays in args: args=(np.asarray(value),)."
)
_NOT_FOLLOWED = """\
The step captures {name}, a {kind} that holds a NumPy array. What a {kind} holds is not followed, so a \
change of the array would not be noticed. Pass the array in args, or keep it in a list, a dict or an \
attribute."""


@dataclass(eq=False)
class Graph:
    """What a walk reaches, in the order of the walk."""

    variables: list[nnx.Variable[Any]] = field(default_factory=list)
    """Every variable, once."""
    again: list[int] = field(default_factory=list)
    """The id of each variable, module or container where the walk reaches it once more."""
    names: list[str] = field(default_factory=list)
    """The path of each variable, as the user would write it."""
    nodes: list[Any] = field(default_factory=list)
    """Every NNX module, optimizer, metric and random stream, once."""
    node_names: list[str] = field(default_factory=list)
    """The path of each node."""
    arrays: list[tuple[str, CapturePath]] = field(default_factory=list)
    """Name and path of every captured array that is an input: not in a variable, nor a small NumPy one."""
    copies: list[CapturePath] = field(default_factory=list)
    """Paths of the captured NumPy arrays that become constants of the program."""
    static_paths: list[tuple[str, CapturePath]] = field(default_factory=list)
    """Name and path of every static number or string."""
    guard: IdentityGuard = field(default_factory=IdentityGuard)
    """Notices at later calls if any of this has changed."""


class Walker:
    """Walks from roots to everything reachable."""

    def __init__(self, used: AttributeNames) -> None:
        self.graph = Graph()
        self._used = used
        self._seen: dict[int, int] = {}
        """The number of each object in the order of the walk, by its id."""
        self._keep: list[Any] = []
        """These objects, so that no id is reused during the walk."""

    def visit(self, value: Any, name: str, place: CapturePath) -> Any:
        """Walks one value, stored at ``place``, and returns its key."""
        if isinstance(value, _PLAIN_TYPES):
            self.graph.static_paths.append((name, place))
            if is_library(type(value).__module__):
                return plain_key(value)
        if isinstance(value, jax.Array) or self._stands_for_array(value):
            self.graph.arrays.append((name, place))
            return ("array", value.shape, value.dtype, getattr(value, "weak_type", False))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return self._numpy(value, name, place)
        if type(value) in _PROXIES:
            return IdentityKey(value)
        number = self._seen.get(id(value))
        if number is not None:
            if isinstance(value, (nnx.Variable, nnx.Pytree, *_CONTAINERS)):
                self.graph.again.append(id(value))
            return ("again", number)
        self._seen[id(value)] = len(self._seen)
        self._keep.append(value)
        return self._visit_new(value, name, place)

    def _stands_for_array(self, value: Any) -> bool:
        """True for the shape of an array of a module from ``nnx.eval_shape``, not for one of its settings."""
        is_shape = isinstance(value, jax.ShapeDtypeStruct)
        return is_shape and any(x is value for x in jax.tree.leaves(self.graph.nodes))

    def _visit_new(self, value: Any, name: str, place: CapturePath) -> Any:
        if isinstance(value, nnx.Variable):
            return self._variable(value, name)
        if isinstance(value, nnx.Pytree):
            return self._node(value, name)
        if isinstance(value, nnx.State):
            return (nnx.State, self._table(value.raw_mapping, name))
        if isinstance(value, _CONTAINERS):
            return self._container(value, name, place)
        if isinstance(value, (*_PLAIN_TYPES, bytearray, array, np.ndarray)):
            return self._value(value, name)
        if isinstance(value, (deque, ContextVar, weakref.ref)):
            _check_holds_no_numpy(value, name)
            return IdentityKey(value)
        if (followed := getattr(type(value), "_followed_in_steps", None)) is not None:
            # A user's subclass adds other modules, optimizers, numbers.
            added = None if is_library(type(value).__module__) else self._attributes(value, name)
            return (type(value), self._items(vars(value), followed, name), added)
        holds_numbers = hasattr(type(value), "__array__") or is_foreign(value)
        if holds_numbers and (described := describe_foreign(value)):
            raise StaleCaptureError(_FOREIGN.format(name=name, kind=described))
        if callable(value) and not isinstance(value, type):
            return self._callable(value, name)
        return self._object(value, name)

    def _value(self, value: Any, name: str) -> Any:
        """A number or string of the user's class, a NumPy array of objects, a buffer."""
        if isinstance(value, _PLAIN_TYPES):
            return (plain_key(value), self._attributes(value, name))
        if isinstance(value, np.ndarray):
            self.graph.guard.add_bytes(value.tobytes)
            items = [(x, f"{name}.flat[{i}]", FixedValue(x)) for i, x in enumerate(value.flat)]
            return (value.shape, *starmap(self.visit, items))
        self.graph.guard.add_bytes(functools.partial(bytes, value))
        return (type(value), getattr(value, "typecode", None), bytes(value))

    def _numpy(self, numbers: np.ndarray[Any, Any], name: str, place: CapturePath) -> Any:
        """A small array is guarded and traced through a copy; a large one is an input.

        One of a class with other operators or attributes, as a masked array or a matrix, stays a constant.
        """
        is_large = numbers.nbytes > _MAX_CONSTANT_BYTES and is_numeric(numbers.dtype)
        if place.can_set and is_large and type(numbers) in (np.ndarray, np.memmap):
            self.graph.arrays.append((name, place))
            return ("array", numbers.shape, numbers.dtype, False)
        self.graph.guard.add_bytes(numbers.tobytes)
        if place.can_set:
            self.graph.copies.append(place)
        if is_library(type(numbers).__module__):
            return (type(numbers), opaque_key(numbers))
        return (type(numbers), opaque_key(numbers), self._attributes(numbers, name))

    def _variable(self, variable: nnx.Variable[Any], name: str) -> Any:
        self.graph.variables.append(variable)
        self.graph.names.append(name)
        raw = variable.get_raw_value()
        [table] = read_metadata([variable])
        self.graph.guard.add_metadata(variable)
        metadata = tuple(
            (key, self.visit(value, f"{name}.{key}", ItemPath(table, key)))
            if key not in variable.required_metadata
            else (key, value)
            for key, value in sorted(table.items())
        )
        if getattr(raw, "weak_type", False):
            self.graph.guard.weakly_typed.append(variable)
        leaves, treedef = jax.tree.flatten(raw)
        arrays = (jax.Array, np.ndarray, np.generic)
        types = [
            (x.shape, x.dtype, getattr(x, "weak_type", False)) if isinstance(x, arrays) else type(x)
            for x in leaves
        ]
        return (type(variable), metadata, treedef, *types)

    def _node(self, node: Any, name: str) -> Any:
        self.graph.nodes.append(node)
        self.graph.node_names.append(name)
        table = vars(node)
        self.graph.guard.add_contents(table.values())
        children = tuple(
            (key, self.visit(child, _attribute(name, key), ItemPath(table, key)))
            for key, child in sorted(table.items())  # Flax reorders the table at will
            if key not in HIDDEN_ATTRIBUTES
        )
        return (type(node), children, self._class(type(node), name, every=True))

    def _container(self, value: Any, name: str, place: CapturePath) -> Any:
        if isinstance(value, dict):
            items: Any = self._table(value, name)
        elif isinstance(value, _VIEWS):  # of a dict, which may change
            items = tuple(self.visit(below, name, place) for below in gc.get_referents(value))
        else:
            if isinstance(value, (list, set)):
                self.graph.guard.add_contents(value)
            items = tuple(
                self.visit(item, f"{name}[{i}]", _element(value, place, i, item))
                for i, item in enumerate(list(value))
            )
        if is_library(type(value).__module__):
            return (type(value), items)
        return (type(value), items, self._attributes(value, name))

    def _table(self, table: Any, name: str) -> Any:
        self.graph.guard.add_mapping(table)
        settable = isinstance(table, dict)
        keys = []
        for key, child in list(table.items()):
            place = ItemPath(table, key) if settable else FixedValue(child)
            keys.append((key, self.visit(child, f"{name}[{key!r}]", place)))
        return tuple(keys)

    def _callable(self, value: Any, name: str) -> Any:
        module = getattr(value, "__module__", None)
        if is_library(module) and not _wraps_user_code(value):
            if isinstance(value, _GETTERS):  # their names are in no code
                self._used.names.update(re.findall(r"\w+", repr(value)))
            return self._closure(value, name) if is_optax(module) else opaque_key(value)
        if isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self.graph.guard.add_attribute(value, part)
            self.graph.guard.add_mapping(value.keywords)
        captured = captures(value, named=True)
        self._used.read(captured.codes)
        is_object = captured.values and captured.values[0] is value
        attributes = self._object(value, name) if is_object else None
        reached = tuple(
            self.visit(child, child_name, place)
            for child, child_name, place in captured.roots
            if child is not value
        )
        rules = tuple(
            self.visit(rule, f"{name}.{key}", FixedValue(rule)) for key, rule in _rules(value)
        )
        function = self._function(function_behind(value), name)
        return (tuple(captured.key), attributes, reached, rules, function)

    def _closure(self, value: Any, name: str) -> Any:
        """Walks what an optax transformation closes over: rates, schedules, inner transformations."""
        cells = getattr(value, "__closure__", None)
        if not cells:
            return opaque_key(value)
        self.graph.guard.add_cells(cells)
        keys = []
        for free, cell in zip(value.__code__.co_freevars, cells, strict=True):
            variable = AttributePath(cell, "cell_contents")
            keys.append(self.visit(variable.get(), f"{name}.{free}", variable))
        return (value.__code__, *keys)

    def _function(self, function: types.FunctionType | None, name: str) -> Any:
        """Guards the globals and cells of a function, and walks its attributes."""
        if function is None:
            return None
        self.graph.guard.add_cells(function.__closure__ or ())
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            self.graph.guard.add_attribute(function, part)
        if function.__kwdefaults__:
            self.graph.guard.add_mapping(function.__kwdefaults__)
        scope = function.__globals__
        for key in global_names(function.__code__):
            if key in scope and not isinstance(scope[key], jax.Array):
                self.graph.guard.add_item(scope, key)
        table = vars(function)
        return self._items(table, [key for key in table if key in self._used.names], name)

    def _object(self, value: Any, name: str) -> Any:
        if isinstance(value, DistributedValues):
            return opaque_key(value)
        if isinstance(value, type):
            metaclass = self._class(type(value), name, every=False)
            return (value, metaclass, self._class(value, name, every=False, constructed=True))
        module = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
        if is_library(module) and not is_followed_whole(value):
            return opaque_key(value)
        return (type(value), self._attributes(value, name))

    def _attributes(self, value: Any, name: str) -> Any:
        """Walks those attributes of a user's object that the code mentions, and its class."""
        table = getattr(value, "__dict__", None)
        if not isinstance(table, dict):  # an object with slots only
            table = {}
        every = self._used.all or is_followed_whole(value)
        if not isinstance(value, types.ModuleType):
            self.graph.guard.add_attribute(value, "__dict__")
            self.graph.guard.add_attribute(value, "__class__")
            self.graph.guard.add_table(table)
            if every:
                self.graph.guard.add_contents(table.keys())
        children = self._items(table, sorted(k for k in [*table] if every or k in self._used), name)
        slots = []
        for key in self._used.slots(value, every=every):
            self.graph.guard.add_attribute(value, key)
            slot = AttributePath(value, key)
            slots.append(self.visit(slot.get(), f"{name}.{key}", slot))
        # Code that iterates over all attributes depends on their order.
        order = tuple(table) if every else ()
        return (order, children, *slots, self._class(type(value), name, every=False))

    def _items(self, table: dict[str, Any], keys: Iterable[str], name: str) -> Any:
        items = []
        for key in keys:
            if not isinstance(table[key], jax.Array):
                self.graph.guard.add_item(table, key)
            items.append((key, self.visit(table[key], _attribute(name, key), ItemPath(table, key))))
        return tuple(items)

    def _class(self, cls: type, name: str, *, every: bool, constructed: bool = False) -> Any:
        """Walks the methods and class attributes that a step may use, in the user's classes only."""
        members: list[Any] = []
        for owner, key, member in self._used.class_members(
            cls, every=every, constructed=constructed
        ):
            self.graph.guard.add_class_item(owner, key)
            function = function_of(member)
            if function is not None:
                parts: list[Any] = [function]
                if isinstance(member, functools.partialmethod):
                    parts += [member.args, member.keywords]
                members += (self.visit(part, f"{name}.{key}", FixedValue(part)) for part in parts)
            elif is_data(key, member):
                members.append(self.visit(member, f"{name}.{key}", AttributePath(owner, key)))
        return tuple(members)


def _element(container: Any, place: CapturePath, index: int, item: Any) -> CapturePath:
    if isinstance(container, list):
        return ItemPath(container, index)
    return MemberPath(place, index) if isinstance(container, tuple) else FixedValue(item)


def _check_holds_no_numpy(holder: Any, name: str) -> None:
    """Refuses NumPy arrays in a container that is not followed; JAX's arrays are found in the trace."""
    value = holder.get(None) if isinstance(holder, ContextVar) else holder
    items = list(value) if isinstance(holder, deque) else [holder() if value is holder else value]
    if any(isinstance(item, np.ndarray) for item in items):
        raise StaleCaptureError(_NOT_FOLLOWED.format(name=name, kind=type(holder).__name__))


def _wraps_user_code(value: Any) -> bool:
    made_by_exec = isinstance(value, types.FunctionType) and value.__module__ is None
    if made_by_exec or isinstance(value, functools.partial):
        return True
    inner = getattr(value, "__wrapped__", None)
    return inner is not None and not is_library(getattr(inner, "__module__", None))


def _rules(value: Any) -> list[tuple[str, Any]]:
    """Returns the other functions of a library's wrapper, such as the rules of a ``custom_vjp``."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):  # maybe of functools.singledispatch
        return [("registry", vars(value)["registry"])] if "registry" in vars(value) else []
    if not is_library(type(value).__module__):
        return []
    inner, table = getattr(value, "__wrapped__", None), getattr(value, "__dict__", None) or {}
    return [
        (key, rule)
        for key, rule in sorted(table.items())
        if isinstance(rule, types.FunctionType) and rule is not inner
    ]


def _attribute(owner: str, key: str) -> str:
    return f"{owner}[{key}]" if key.isdigit() else f"{owner}.{key}"


@dataclass(frozen=True, eq=False)
class IdentityKey:
    """Keys a value by its identity, and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def plain_key(value: Any) -> Any:
    """Keys a number or string by its bits: 0.0 is not -0.0, and NaN is NaN."""
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    if isinstance(value, np.generic):
        return (type(value), value.dtype, value.tobytes())
    return (type(value), value)


def opaque_key(value: Any) -> Any:
    """Keys a value that is not walked: by equality if it defines one, else by identity."""
    if isinstance(value, np.ndarray):
        return ("ndarray", value.shape, str(value.dtype), hash(value.tobytes()))
    defines_hash = cast("Any", type(value)).__hash__ not in (None, object.__hash__)
    if not defines_hash or isinstance(value, types.FunctionType) or not _is_hashable(value):
        return IdentityKey(value)
    return (type(value), value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except Exception:  # not only TypeError: memoryview raises ValueError
        return False
    return True
