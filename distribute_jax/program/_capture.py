"""What a function reaches without its arguments: closure cells, globals, defaults, ``self``."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
from flax import nnx

from distribute_jax.program._place import Cell, Fixed, Item, Place, cell_value

_LIBRARIES = frozenset({
    "jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax", "chex", "distribute_jax", "scipy",
    "sklearn", "tensorflow", "torch", "keras", "rich", "pytest", "hypothesis",
})  # fmt: skip
_LIBRARY_NAMES = _LIBRARIES | frozenset(sys.stdlib_module_names) - {"__main__"}


def is_library(module: str | None) -> bool:
    """Tells whether code of this module holds no state of the user's, so it is not searched."""
    return module is None or module.partition(".")[0] in _LIBRARY_NAMES


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names the globals that a code object and the code nested in it load."""
    found: dict[str, None] = {}
    for part in nested_code(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
                found[instruction.argval] = None
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Names every attribute and global that a code object and the code nested in it mention."""
    return frozenset(name for part in nested_code(code) for name in part.co_names)


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Gives a code object and every function, lambda and comprehension written inside it."""
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
class Roots:
    """What a callable reaches directly: cells, globals, defaults, ``self``, arguments of a partial."""

    key: list[Any] = field(default_factory=list)
    """Equal for callables of the same code."""
    values: list[Any] = field(default_factory=list)
    """The values reached."""
    names: list[str] | None = None
    """Where asked for: the name of each value in the user's code."""
    places: list[Place] | None = None
    """Where asked for: the place of each value."""

    def add(self, value: Any, name: str, place: Place | None = None) -> None:
        """Adds one value with its name and place."""
        self.values.append(value)
        if self.names is not None and self.places is not None:
            self.names.append(name)
            self.places.append(place or Fixed(value))


def roots(fn: Callable[..., Any], *, named: bool = False) -> Roots:
    """Takes a callable apart, without looking into what it reaches.

    Partials, bound methods, callable objects, ``functools.wraps`` and jitted functions are looked
    through. ``named`` also records names and places; the call path of ``run`` does without.
    """
    found = Roots(names=[], places=[]) if named else Roots()
    _collect(fn, found)
    return found


def _collect(fn: Any, found: Roots) -> None:
    if isinstance(fn, types.FunctionType):
        _collect_function(fn, found)
    elif isinstance(fn, types.MethodType):
        found.add(fn.__self__, "self")
        _collect(fn.__func__, found)
    elif isinstance(fn, partial):
        found.key.append(("partial", len(fn.args), tuple(fn.keywords)))
        for i, value in enumerate(fn.args):
            found.add(value, f"partial argument {i}")
        for name, value in fn.keywords.items():
            found.add(value, name)
        _collect(fn.func, found)
    elif (inner := getattr(fn, "__wrapped__", None)) is not None:
        found.key.append(type(fn))
        _collect(inner, found)
    else:
        _collect_callable_object(fn, found)


def _collect_function(fn: types.FunctionType, found: Roots) -> None:
    code = fn.__code__
    found.key.append(code)
    scope, values = fn.__globals__, found.values
    names = [name for name in global_names(code) if name in scope]
    if found.names is None:
        if fn.__closure__:
            values += map(cell_value, fn.__closure__)
        values += map(scope.__getitem__, names)
    else:
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            found.add(cell_value(cell), name, Cell(cell))
        for name in names:
            found.add(scope[name], name, Item(scope, name))
    for i, value in enumerate(fn.__defaults__ or ()):
        found.add(value, f"default {i}")
    for name, value in (fn.__kwdefaults__ or {}).items():
        found.add(value, name)
    if (inner := fn.__dict__.get("__wrapped__")) is not None:
        _collect(inner, found)


def _collect_callable_object(fn: Any, found: Roots) -> None:
    found.add(fn, "the callable")
    method = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(method, types.FunctionType) and not is_library(method.__module__):
        _collect(method, found)
    else:
        found.key.append(type(fn))


def codes(fn: Callable[..., Any]) -> list[types.CodeType]:
    """Gives the code objects that make up a callable."""
    return [part for part in roots(fn).key if isinstance(part, types.CodeType)]
