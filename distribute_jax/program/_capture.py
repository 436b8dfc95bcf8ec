"""What a function captures: closure cells, globals, defaults, ``self``, and attributes it mentions."""

from __future__ import annotations

import argparse
import ast
import dis
import functools
import inspect
import sys
import textwrap
import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
from flax import nnx

from distribute_jax.program._places import (
    CapturePath,
    CellPath,
    DefaultPath,
    FixedValue,
    ItemPath,
    PartialArgumentPath,
    cell_value,
    cell_values,
)

_LIBRARIES = frozenset({
    "jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax", "chex", "distribute_jax", "scipy",
    "sklearn", "tensorflow", "torch", "keras", "rich", "tqdm", "pytest", "_pytest", "pluggy",
    "hypothesis",
})  # fmt: skip
_LIBRARY_NAMES = _LIBRARIES | frozenset(sys.stdlib_module_names) - {"__main__"}


def is_library(module: str | None) -> bool:
    """Returns whether code of this module holds no state of the user's, so it is not searched."""
    return module is None or module.partition(".")[0] in _LIBRARY_NAMES


def is_optax(module: str | None) -> bool:
    """Whether code of this module keeps what the user gave it, such as schedules, in closures."""
    return module is not None and module.partition(".")[0] == "optax"


_MOST_KNOWN = 4096
_known_names: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names the globals that a code object and the code nested in it load.

    Every call of ``run`` asks: remembered by identity, since the hash of code reads all of it.
    """
    known = _known_names.get(id(code))
    if known is None:
        if len(_known_names) >= _MOST_KNOWN:
            _known_names.clear()
        known = _known_names[id(code)] = (code, _loaded_globals(code))
    return known[1]


def _loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for part in nested_code(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
                found[instruction.argval] = None
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Names every attribute and global that a code object and the code nested in it mention.

    Words in its constants count too: they are what ``getattr(x, "name")`` and ``match`` read.
    """
    found = {name for part in nested_code(code) for name in part.co_names}
    for part in nested_code(code):
        for constant in part.co_consts:
            words = constant if isinstance(constant, tuple) else (constant,)
            for word in words:
                if isinstance(word, str):
                    found.update(name for name in word.split(".") if name.isidentifier())
    return frozenset(found)


_READS_ALL = frozenset({"vars", "__dict__", "asdict", "astuple"})


@functools.lru_cache(maxsize=4096)
def reads_any_attribute(code: types.CodeType) -> bool:
    """Returns whether code of the user's reads attributes whose names are not written in it."""
    if "site-packages" in code.co_filename:  # a library that looks through its own objects
        return False
    names = {name for part in nested_code(code) for name in part.co_names}
    return bool(names & _READS_ALL) or ("getattr" in names and _computes_names(code))


def _computes_names(code: types.CodeType) -> bool:
    """Returns whether a ``getattr`` gets anything but a written name; unreadable source means yes."""
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
    """Returns the function of a callable: a bound method's, or the one that was wrapped."""
    function = inspect.unwrap(value)
    function = getattr(function, "__func__", function)
    return function if isinstance(function, types.FunctionType) else None


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Returns a code object and every function, lambda and comprehension written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


_JITTED = (type(jax.jit(lambda: None)), type(nnx.jit(lambda: None)))


def without_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Takes a jit off a function: run compiles it anyway, and Flax forbids changes across a jit."""
    while isinstance(fn, _JITTED):
        fn = cast("Any", fn).__wrapped__
    return fn


@dataclass(slots=True, eq=False)
class Captures:
    """What a callable reaches directly: cells, globals, defaults, ``self``, arguments of a partial."""

    key: list[Any] = field(default_factory=list)
    """Equal for callables of the same code; of the very same code object, where no names are asked for."""
    values: list[Any] = field(default_factory=list)
    """The values reached."""
    names: list[str] | None = None
    """Where asked for: the name of each value in the user's code."""
    places: list[CapturePath] | None = None
    """Where asked for: the place of each value."""

    def add(self, value: Any, name: str, place: CapturePath | None = None) -> None:
        """Adds one value with its name and place."""
        self.values.append(value)
        if self.names is not None and self.places is not None:
            self.names.append(name)
            self.places.append(place or FixedValue(value))


def captures(fn: Callable[..., Any], *, named: bool = False) -> Captures:
    """Takes a callable apart, without looking into what it reaches.

    Partials, bound methods, callable objects, ``functools.wraps`` and jitted functions are looked
    through. ``named`` also records names and places; the call path of ``run`` does without.
    """
    found = Captures(names=[], places=[]) if named else Captures()
    _collect(fn, found)
    return found


def _collect(fn: Any, found: Captures) -> None:
    if isinstance(fn, types.FunctionType):
        _collect_function(fn, found)
    elif isinstance(fn, types.MethodType):
        found.add(fn.__self__, "self")
        _collect(fn.__func__, found)
    elif isinstance(fn, partial):
        found.key.append(("partial", len(fn.args), tuple(fn.keywords)))
        for i, value in enumerate(fn.args):
            found.add(value, f"partial argument {i}", PartialArgumentPath(fn, i))
        for name, value in fn.keywords.items():
            found.add(value, name, PartialArgumentPath(fn, name))
        _collect(fn.func, found)
    elif (inner := getattr(fn, "__wrapped__", None)) is not None:
        found.key.append(type(fn))
        _collect(inner, found)
    else:
        _collect_callable_object(fn, found)


def _collect_function(fn: types.FunctionType, found: Captures) -> None:
    code = fn.__code__
    found.key.append(id(code) if found.names is None else code)
    scope, values = fn.__globals__, found.values
    names = [name for name in global_names(code) if name in scope]
    if found.names is None:
        if fn.__closure__:
            values += cell_values(fn.__closure__)
        values += map(scope.__getitem__, names)
    else:
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            found.add(cell_value(cell), name, CellPath(cell))
        for name in names:
            found.add(scope[name], name, ItemPath(scope, name))
    for i, value in enumerate(fn.__defaults__ or ()):
        found.add(value, f"default {i}", DefaultPath(fn, i))
    for name, value in (fn.__kwdefaults__ or {}).items():
        found.add(value, name, ItemPath(fn.__kwdefaults__, name))
    if (inner := fn.__dict__.get("__wrapped__")) is not None:
        _collect(inner, found)


def _collect_callable_object(fn: Any, found: Captures) -> None:
    found.add(fn, "the callable")
    method = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(method, types.FunctionType) and not is_library(method.__module__):
        _collect(method, found)
    else:
        found.key.append(type(fn))


def codes(fn: Callable[..., Any]) -> list[types.CodeType]:
    """Returns the code objects that make up a callable."""
    return [part for part in captures(fn, named=True).key if isinstance(part, types.CodeType)]


_HOLDERS = (
    types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap,
)  # fmt: skip
"""Classes of the standard library that hold the user's values in attributes."""

_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_NEVER = frozenset({
    "__repr__", "__str__", "__del__", "__getstate__", "__setstate__", "__reduce__",
    "__reduce_ex__", "__init_subclass__", "__set_name__", "__class_getitem__", "__hash__",
})  # fmt: skip
"""Methods that a step does not call, though it may call every other special one unseen."""

_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, property)


def is_whole(value: Any) -> bool:
    """Returns whether everything that an object holds counts, whatever the code mentions."""
    # A pytree, such as Flax's TrainState, is read leaf by leaf.
    return isinstance(value, _HOLDERS) or not jax.tree_util.all_leaves([value])


class Attributes:
    """The attribute names that code mentions, and what of an object they select.

    Attributes:
        names: every name mentioned.
        any: whether code reads attributes by computed names, so that all of them count.
    """

    def __init__(self) -> None:
        """Starts with no name."""
        self.names: set[str] = set()
        self.any = False

    def extent(self) -> tuple[int, bool]:
        """Grows with every name that is added."""
        return (len(self.names), self.any)

    def table_of(self, value: Any) -> dict[str, Any]:
        """Returns the dict of an object; an object with slots only has none."""
        table = getattr(value, "__dict__", None)
        return table if isinstance(table, dict) else {}

    def of_table(self, table: dict[str, Any], *, whole: bool) -> list[str]:
        """Returns the keys that may be read."""
        return [key for key in list(table) if whole or self.any or key in self.names]

    def without_table(self, value: Any) -> list[str]:
        """Returns the attributes that may be read and are in no dict."""
        found = {
            key
            for owner in type(value).__mro__
            if not is_library(owner.__module__)
            for key, member in vars(owner).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        return sorted(key for key in found if self.any or key in self.names)

    def of_class(self, cls: type, *, every: bool, makes: bool) -> Iterator[tuple[type, str, Any]]:
        """Returns class, name and value of all that may be read from the user's classes.

        A name that one class of the family has is given for each: assigned there later, it hides the
        other. Its value is then None.
        """
        owners = [owner for owner in cls.__mro__ if not is_library(owner.__module__)]
        keys = dict.fromkeys(
            key
            for owner in owners
            for key, member in list(vars(owner).items())
            if self._is_used(key, makes=makes) or (every and function_of(member) is not None)
        )
        for owner in owners:
            for key in keys:
                yield owner, key, vars(owner).get(key)

    def is_data(self, key: str, member: Any) -> bool:
        """Returns whether a member of a class is a value rather than machinery of Python."""
        special = key.startswith("__") and key.endswith("__")
        return not special and member is not None and not isinstance(member, _DESCRIPTORS)

    def _is_used(self, key: str, *, makes: bool) -> bool:
        if key.startswith("__") and key.endswith("__"):
            return key not in _NEVER and (makes or key not in _MAKING)
        return self.any or key in self.names


def function_of(member: Any) -> types.FunctionType | None:
    """Returns the function behind a method, property or cached property."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, types.FunctionType) else None
