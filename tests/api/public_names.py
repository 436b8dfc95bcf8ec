"""The public names of a package, the members of its classes, and faults in their documentation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example|Attributes|Source|References?):", re.M)


@dataclass(frozen=True)
class Public:
    """A public object, its name, and the public module that lists it."""

    name: str
    """As the user writes it after importing the package."""
    value: Any
    shown_by: str
    """The public module."""


def public_modules(package: ModuleType) -> list[ModuleType]:
    """Returns the package and its public sub-packages."""
    listed = [getattr(package, name, None) for name in package.__all__]
    inner = [value for value in listed if isinstance(value, ModuleType)]
    return [package, *(module for value in inner for module in public_modules(value))]


def public_objects(package: ModuleType) -> list[Public]:
    """Returns every listed class, function and constant, and every public member of a class."""
    found = []
    for module in public_modules(package):
        for name in module.__all__:
            value = getattr(module, name, None)
            if value is not None and not isinstance(value, ModuleType):
                found.append(Public(f"{module.__name__}.{name}", value, module.__name__))
                found += _members(f"{module.__name__}.{name}", value, package, module.__name__)
    return found


def _members(name: str, cls: Any, package: ModuleType, shown_by: str) -> Iterator[Public]:
    """Returns the methods and properties that a class or a base of it in the package defines."""
    if not inspect.isclass(cls):
        return
    owners = [c for c in cls.__mro__ if c.__module__.split(".")[0] == package.__name__]
    seen = set()
    for owner in owners:
        for key, member in vars(owner).items():
            public = not key.startswith("_") or key == "__init__"
            if public and key not in seen and _is_member(member):
                seen.add(key)
                yield Public(f"{name}.{key}", _function(member), shown_by)


def _is_member(member: Any) -> bool:
    kinds = (property, cached_property, classmethod, staticmethod)
    return isinstance(member, kinds) or inspect.isfunction(member)


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return getattr(member, "func", None) or getattr(member, "__func__", member)


def list_faults(package: ModuleType) -> Iterator[str]:
    """Yields faults of ``__all__``: unsorted, incomplete, or with a name that cannot be imported."""
    for module in public_modules(package):
        names = list(module.__all__)
        if names != sorted(set(names)):
            yield f"{module.__name__}.__all__ is not sorted, or lists a name twice"
        for name in names:
            if not hasattr(module, name):
                yield f"{module.__name__}.__all__ lists {name}, which cannot be imported"
        for name in sorted(_imported_for_users(module) - set(names)):
            yield f"{module.__name__}.{name} is imported as a public name but not in __all__"


def _imported_for_users(module: ModuleType) -> set[str]:
    """Returns the names that the module's source imports in the form ``X as X``, or defines."""
    tree = ast.parse(inspect.getsource(module))
    # Imports for type checkers are those of names that are loaded later.
    body = [n for part in tree.body for n in getattr(part, "body", [part])]
    aliases = [a for n in body if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names]
    defined = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names = {a.asname for a in aliases if a.asname == a.name} | set(defined)
    return {name for name in names if name and not name.startswith("_")}


def docstring_faults(package: ModuleType) -> Iterator[str]:
    """Yields public objects without a docstring, or with one that documents other arguments."""
    for public in public_objects(package):
        value, last = public.value, public.name.rpartition(".")[2]
        if last == "__init__" or not callable(value):
            continue
        text = inspect.getdoc(value) or ""
        if not text or (inspect.isclass(value) and _is_generated(value)):
            yield f"{public.name} has no docstring"
        if inspect.isfunction(value):
            yield from _argument_faults(public.name, value, text)


def _is_generated(cls: type) -> bool:
    """True if a docstring is inherited, or the signature that ``dataclass`` writes."""
    text = cls.__dict__.get("__doc__") or ""
    return not text or text.startswith(f"{cls.__name__}(")


def _argument_faults(name: str, function: Any, text: str) -> Iterator[str]:
    documented = documented_arguments(text)
    taken = [p.name for p in inspect.signature(function).parameters.values()]
    taken = [p for p in taken if p not in {"self", "cls"}]
    if documented and documented != taken:
        yield f"{name} documents the arguments {documented} but takes {taken}"


def documented_arguments(text: str) -> list[str]:
    """Returns the names below ``Args:`` in a docstring."""
    _, found, rest = text.partition("Args:\n")
    if not found:
        return []
    return re.findall(r"^    \*{0,2}(\w+):", SECTION.split(rest)[0], re.MULTILINE)


def module_faults(package: ModuleType) -> Iterator[str]:
    """Yields classes and functions that show a private module in tracebacks and help."""
    shown = {module.__name__ for module in public_modules(package)}
    for public in public_objects(package):
        is_listed = f"{public.shown_by}.{public.name.rpartition('.')[2]}" == public.name
        named = inspect.isclass(public.value) or inspect.isfunction(public.value)
        if is_listed and named and public.value.__module__ not in shown:
            yield f"{public.name}.__module__ is {public.value.__module__!r}"


def annotation_faults(package: ModuleType) -> Iterator[str]:
    """Yields public functions and methods with an unannotated argument or result."""
    for public in public_objects(package):
        if not inspect.isfunction(public.value):
            continue
        signature = inspect.signature(public.value)
        named = {n: p for n, p in signature.parameters.items() if n not in {"self", "cls"}}
        missing = [n for n, p in named.items() if p.annotation is p.empty]
        if signature.return_annotation is signature.empty:
            missing.append("the result")
        if missing:
            yield f"{public.name} has no type for {', '.join(missing)}"
