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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
from flax import nnx

from distribute_jax.program._places import (
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
    """Names every attribute and global that a code object and the code nested in it mention.

    Words in its constants count too: they are what ``getattr(x, "name")`` and ``match`` read.
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


_READS_ALL = frozenset({"vars", "__dict__", "asdict", "astuple"})


@functools.lru_cache(maxsize=4096)
def reads_any_attribute(code: types.CodeType) -> bool:
    """Returns whether the user's code reads attributes whose names do not appear in it."""
    if "site-packages" in code.co_filename:  # a library that looks through its own objects
        return False
    names = {name for part in nested_code(code) for name in part.co_names}
    return bool(names & _READS_ALL) or ("getattr" in names and _computes_names(code))


def _computes_names(code: types.CodeType) -> bool:
    """Returns whether a ``getattr`` computes its name; yes where the source cannot be read."""
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

    key: list[Any]
    """Equal for callables of the same code; of the very same code object, where nothing is recorded."""
    values: list[Any]
    records: list[tuple[str, CapturePath]] | None
    """The name in the user's code and the place of each value; the call path of ``run`` does without."""

    @property
    def roots(self) -> list[tuple[Any, str, CapturePath]]:
        """Each value with its name and place."""
        pairs = zip(self.values, self.records or (), strict=True)
        return [(value, name, place) for value, (name, place) in pairs]

    @property
    def codes(self) -> list[types.CodeType]:
        """The code objects that make up the callable, where names are recorded."""
        return [part for part in self.key if isinstance(part, types.CodeType)]

    def add(self, value: Any, name: str, place: CapturePath | None = None) -> None:
        """Adds one value with its name and place."""
        self.values.append(value)
        if self.records is not None:
            self.records.append((name, place or FixedValue(value)))


def captures(fn: Callable[..., Any], *, named: bool = False) -> Captures:
    """Takes a callable apart, without looking into what it reaches.

    Partials, bound methods, callable objects, ``functools.wraps`` and jitted functions are looked through.
    """
    captured = Captures([], [], [] if named else None)
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
        if not is_library(type(fn).__module__):  # a decorator that is a class of the user's
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


class AttributeNames:
    """The attribute names that code mentions, and what of an object they select."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.any = False
        """Whether code reads attributes by computed names, so that all of them count."""

    def __contains__(self, key: str) -> bool:
        return self.any or key in self.names

    def __len__(self) -> int:
        """Grows with all that is read."""
        return len(self.names) + self.any

    def read(self, codes: Iterable[types.CodeType]) -> None:
        """Adds the names that pieces of code use."""
        for code in codes:
            self.names.update(attribute_names(code))
            self.any = self.any or reads_any_attribute(code)

    def slots(self, value: Any) -> list[str]:
        """Returns the attributes that may be read and are in no dict."""
        names = {
            key
            for owner in type(value).__mro__
            if not is_library(owner.__module__)
            for key, member in vars(owner).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        return sorted(key for key in names if key in self)

    def of_class(self, cls: type, *, every: bool, makes: bool) -> Iterator[tuple[type, str, Any]]:
        """Returns class, name and value of all that may be read from the user's classes.

        A name that one class of the family has is given for each: assigned there later, it hides the
        other. Its value is then None.
        """
        owners = [owner for owner in cls.__mro__ if not is_library(owner.__module__)]
        unused = _NEVER if makes else _NEVER | _MAKING
        keys = dict.fromkeys(
            key
            for owner in owners
            for key, member in list(vars(owner).items())
            if (key not in unused if is_special(key) else key in self)
            or (every and function_of(member) is not None)
        )
        for owner in owners:
            for key in keys:
                yield owner, key, vars(owner).get(key)


def is_special(key: str) -> bool:
    """Returns whether a name is one that Python gives a meaning to."""
    return key.startswith("__") and key.endswith("__")


def is_data(key: str, member: Any) -> bool:
    """Returns whether a member of a class is a value rather than machinery of Python."""
    return not is_special(key) and member is not None and not isinstance(member, _DESCRIPTORS)


def function_of(member: Any) -> types.FunctionType | None:
    """Returns the function behind a method, property or cached property."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, types.FunctionType) else None
