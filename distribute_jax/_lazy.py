"""Attributes of packages that load when they are first read, and where public names are public."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from distribute_jax._absent import missing
from distribute_jax._checks import check_methods, checked


def names_in_stub(file: str) -> dict[str, list[str]]:
    """Returns the names that the stub of a package imports from each part of the package."""
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        str(node.module).partition(".")[2]: [alias.name for alias in node.names]
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
    }


def lazy_exports(
    namespace: dict[str, Any], parts: Mapping[str, Sequence[str]], core: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a module that loads others of its package when they are first read.

    ``parts`` are those with the names that the module takes from each, under ``""`` those that are modules;
    the parts of ``core`` load together. A name that was read is kept in the namespace.
    """
    package, module = namespace["__package__"], namespace["__name__"]
    home = {name: part or name for part, names in parts.items() for name in names}

    def load(name: str) -> Any:
        if name not in home:
            raise missing(
                module.replace("distribute_jax", "dj"),
                f"module {module!r}",
                name,
                sys.modules.get(module),
            )
        # An object may come from a class that no one has read yet, as the optimizer of a model.
        loaded: dict[str, Any] = {}
        for part in core if home[name] in core else (home[name],):
            members = vars(importlib.import_module(f"{package}.{part}"))
            loaded |= {each: members[each] for each in parts.get(part, ()) if each in members}
        found = sys.modules[f"{package}.{home[name]}"]
        loaded[name] = found if home[name] == name else getattr(found, name)
        namespace.update(loaded)
        publish(namespace, loaded, module)
        return namespace[name]

    return load


def public_names(namespace: Mapping[str, Any]) -> list[str]:
    """Returns the sorted names that a public package has imported for its users."""
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "") != __name__
    )


def publish(namespace: dict[str, Any], names: Iterable[str], module: str) -> None:
    """Sets ``__module__`` of what a public package lists and has loaded, and has its arguments checked.

    The package also answers names that are absent in it, with what to type.
    """
    for name in names:
        value = namespace.get(name)
        home = str(getattr(value, "__module__", ""))
        package, *inner = home.split(".")
        is_private = any(part.startswith("_") for part in inner)
        if package == "distribute_jax" and (is_private or home == namespace["__name__"]):
            value.__module__ = module
            if isinstance(value, type):
                check_methods(value)
        if package == "distribute_jax" and isinstance(value, FunctionType):
            namespace[name] = checked(value)  # the same function wherever it is listed
            namespace[name].__module__ = value.__module__
    if namespace["__name__"] == module:
        namespace.setdefault("__getattr__", lazy_exports(namespace, {}))
