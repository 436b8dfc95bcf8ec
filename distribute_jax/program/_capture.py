"""Finds what a function captures: cells, globals, defaults, ``self``, and the attributes that it names."""

from __future__ import annotations

import argparse
import ast
import dis
import functools
import inspect
import sys
import textwrap
import types
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import jax
from flax import nnx

from distribute_jax.program._paths import (
    AttributePath,
    CapturePath,
    FixedValue,
    ItemPath,
    MemberPath,
    cell_values,
)

_LIBRARIES = frozenset({
    "jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax", "chex", "distribute_jax", "scipy",
    "sklearn", "tensorflow", "torch", "keras", "rich", "tqdm", "pytest", "_pytest", "pluggy",
    "hypothesis",
})  # fmt: skip
_LIBRARY_NAMES = _LIBRARIES | frozenset(sys.stdlib_module_names) - {"__main__"}


def is_library(module: str | None) -> bool:
    """True if code of this module holds none of the user's state, so that it is not walked."""
    return module is None or module.partition(".")[0] in _LIBRARY_NAMES


def is_optax(module: str | None) -> bool:
    """True if this module keeps the user's values, such as schedules, in closures."""
    return module is not None and module.partition(".")[0] == "optax"


_MAX_CACHED_CODES = 4096
_cached_global_names: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the globals that a code object and the code nested in it load.

    Every call of ``run`` needs them: cached by identity, since the hash of code reads all of it.
    """
    cached = _cached_global_names.get(id(code))
    if cached is None:
        if len(_cached_global_names) >= _MAX_CACHED_CODES:
            _cached_global_names.clear()
        cached = _cached_global_names[id(code)] = (code, _loaded_globals(code))
    return cached[1]


def _loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            instruction.argval
            for part in nested_code(code)
            for instruction in dis.get_instructions(part)
            if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
        )
    )


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Returns the names of all attributes and globals in a code object and the code nested in it.

    Words in its constants count too, since ``getattr(x, "name")`` and ``match`` read those.
    """
    names: set[str] = set()
    for part in nested_code(code):
        names.update(part.co_names)
        for constant in part.co_consts:
            words = constant if isinstance(constant, tuple) else (constant,)
            for word in words:
                if isinstance(word, str):
                    names.update(name for name in word.split(".") if name.isidentifier())
    return frozenset(names)


_ITERATES_ATTRIBUTES = frozenset({"vars", "__dict__", "asdict", "astuple", "__getattribute__"})


@functools.lru_cache(maxsize=4096)
def reads_any_attribute(code: types.CodeType) -> bool:
    """True if the user's code reads attributes whose names do not appear in it."""
    if "site-packages" in code.co_filename:  # a library that iterates over its own objects
        return False
    names = {name for part in nested_code(code) for name in part.co_names}
    return bool(names & _ITERATES_ATTRIBUTES) or ("getattr" in names and _computes_names(code))


def _computes_names(code: types.CodeType) -> bool:
    """True if a ``getattr`` computes its name, or if the source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return True
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant))
        for node in ast.walk(tree)
    )


def function_behind(value: Any) -> types.FunctionType | None:
    """Returns the function of a bound method or wrapper, if the callable is one."""
    function = inspect.unwrap(value)
    function = getattr(function, "__func__", function)
    return function if isinstance(function, types.FunctionType) else None


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and every function, lambda and comprehension nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


_JITTED = (type(jax.jit(lambda: None)), type(nnx.jit(lambda: None)))


def unwrap_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under a jit: run compiles it anyway, and Flax forbids changes across a jit."""
    while isinstance(fn, _JITTED):
        fn = cast("Any", fn).__wrapped__
    return fn


@dataclass(slots=True, eq=False)
class Captures:
    """What a callable reaches directly: cells, globals, defaults, ``self``, arguments of a partial."""

    key: list[Any]
    """Equal for callables of equal code; without records, of the identical code object."""
    values: list[Any]
    records: list[tuple[str, CapturePath]] | None
    """The name in the user's code and the path of each value; None on the fast path of ``run``."""

    @property
    def roots(self) -> list[tuple[Any, str, CapturePath]]:
        """Each value with its name and path."""
        pairs = zip(self.values, self.records or (), strict=True)
        return [(value, name, place) for value, (name, place) in pairs]

    @property
    def codes(self) -> list[types.CodeType]:
        """The code objects of the callable, if it was recorded."""
        return [part for part in self.key if isinstance(part, types.CodeType)]

    def add(self, value: Any, name: str, place: CapturePath | None = None) -> None:
        self.values.append(value)
        if self.records is not None:
            self.records.append((name, place or FixedValue(value)))


def captures(fn: Callable[..., Any], *, named: bool = False) -> Captures:
    """Returns what a callable reaches directly, without walking the values.

    Partials, bound methods, callable objects, ``functools.wraps`` and jitted functions are unwrapped.
    """
    captured = Captures([], [], [] if named else None)
    if type(fn) is types.FunctionType:
        _collect_function(fn, captured)
    else:
        _collect(fn, captured)
    return captured


def _collect(fn: Any, captured: Captures) -> None:
    if isinstance(fn, types.FunctionType):
        _collect_function(fn, captured)
    elif isinstance(fn, types.MethodType):
        captured.add(fn.__self__, "self")
        _collect(fn.__func__, captured)
    elif isinstance(fn, partial):
        captured.key.append(("partial", len(fn.args), tuple(fn.keywords)))
        args = AttributePath(fn, "args")
        for i, value in enumerate(fn.args):
            captured.add(value, f"partial argument {i}", MemberPath(args, i))
        for name, value in fn.keywords.items():
            captured.add(value, name, ItemPath(fn.keywords, name))
        _collect(fn.func, captured)
    elif (inner := getattr(fn, "__wrapped__", None)) is not None:
        captured.key.append(getattr(fn, "__captures_key__", type(fn)))
        if not is_library(type(fn).__module__):  # the user's decorator class
            _collect_callable_object(fn, captured)
        _collect(inner, captured)
    else:
        _collect_callable_object(fn, captured)


def _collect_function(fn: types.FunctionType, captured: Captures) -> None:
    code, scope = fn.__code__, fn.__globals__
    names = [name for name in global_names(code) if name in scope]
    if captured.records is not None:
        captured.key.append(code)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            variable = AttributePath(cell, "cell_contents")
            captured.add(variable.get(), name, variable)
        for name in names:
            captured.add(scope[name], name, ItemPath(scope, name))
        defaults = AttributePath(fn, "__defaults__")
        for i, value in enumerate(fn.__defaults__ or ()):
            captured.add(value, f"default {i}", MemberPath(defaults, i))
        for name, value in (fn.__kwdefaults__ or {}).items():
            captured.add(value, name, ItemPath(fn.__kwdefaults__, name))
    else:
        captured.key.append(id(code))
        if fn.__closure__:
            captured.values += cell_values(fn.__closure__)
        captured.values += map(scope.__getitem__, names)
        if fn.__defaults__:
            captured.values += fn.__defaults__
        if fn.__kwdefaults__:
            captured.values += fn.__kwdefaults__.values()
    if (inner := fn.__dict__.get("__wrapped__")) is not None:
        _collect(inner, captured)


def _collect_callable_object(fn: Any, captured: Captures) -> None:
    captured.add(fn, "the callable")
    method = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(method, types.FunctionType) and not is_library(method.__module__):
        _collect(method, captured)
    else:
        captured.key.append(type(fn))


_HOLDERS = (
    types.SimpleNamespace, argparse.Namespace, UserDict, UserList, UserString, ChainMap,
)  # fmt: skip
"""Classes of the standard library that hold the user's values in attributes."""

_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_NOT_CALLED = frozenset({
    "__repr__", "__str__", "__del__", "__getstate__", "__setstate__", "__reduce__",
    "__reduce_ex__", "__init_subclass__", "__set_name__", "__class_getitem__", "__hash__",
})  # fmt: skip
"""Special methods that a step does not call; it may call any other without naming it."""

_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, property)


def is_followed_whole(value: Any) -> bool:
    """True if all attributes of an object are followed, not only those that the code names."""
    # JAX reads all leaves of a pytree, such as Flax's TrainState.
    return isinstance(value, _HOLDERS) or not jax.tree_util.all_leaves([value])


class AttributeNames:
    """The attribute names that code mentions, and the members of objects and classes with such names."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.all = False
        """True if code computes names of attributes, so that every attribute may be read."""

    def __contains__(self, key: str) -> bool:
        return self.all or key in self.names

    def __len__(self) -> int:
        return len(self.names) + self.all

    def read(self, codes: Iterable[types.CodeType]) -> None:
        """Adds the names in these code objects."""
        for code in codes:
            self.names.update(attribute_names(code))
            self.all = self.all or reads_any_attribute(code)

    def slots(self, value: Any, *, every: bool) -> list[str]:
        """Returns the names of the slots that may be read."""
        owners = [c for c in type(value).__mro__ if every or not is_library(c.__module__)]
        members = chain.from_iterable(vars(owner).items() for owner in owners)
        slots = {key for key, at in members if isinstance(at, types.MemberDescriptorType)}
        return sorted(key for key in slots if every or key in self)

    def class_members(
        self, cls: type, *, every: bool, constructed: bool
    ) -> Iterator[tuple[type, str, Any]]:
        """Yields class, name and value of each member of the user's classes that may be read.

        A name that any class of the MRO has is yielded for all of them, with None where it is missing: an
        assignment there would hide the other one.
        """
        owners = [owner for owner in cls.__mro__ if not is_library(owner.__module__)]
        unused = _NOT_CALLED if constructed else _NOT_CALLED | _CONSTRUCTORS
        keys = dict.fromkeys(
            key
            for owner in owners
            for key, member in list(vars(owner).items())
            if key not in unused
            and (is_special(key) or key in self or (every and function_of(member) is not None))
        )
        for owner in owners:
            for key in keys:
                yield owner, key, vars(owner).get(key)


def is_special(key: str) -> bool:
    """True if a name is a dunder name."""
    return key.startswith("__") and key.endswith("__")


def is_data(key: str, member: Any) -> bool:
    """True if a member of a class is a value rather than a descriptor."""
    return not is_special(key) and member is not None and not isinstance(member, _DESCRIPTORS)


def function_of(member: Any) -> types.FunctionType | None:
    """Returns the function behind a method, property, cached property or partial method."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (functools.cached_property, functools.partialmethod)):
        member = member.func
    if isinstance(member, functools.singledispatchmethod):
        member = member.dispatcher
    return member if isinstance(member, types.FunctionType) else None
