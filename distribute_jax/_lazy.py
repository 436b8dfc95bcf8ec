"""Lazy imports of public names, and their public ``__module__``."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from distribute_jax._absent import attribute_error
from distribute_jax._checks import check_methods, checked


def names_in_stub(file: str) -> dict[str, list[str]]:
    """Returns the names that a package's stub file imports, by the part of the package they come from."""
    path = Path(file).with_suffix(".pyi")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        str(node.module).partition(f"{path.parent.name}.")[2]: [alias.name for alias in node.names]
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
    }


def lazy_exports(
    namespace: dict[str, Any], parts: Mapping[str, Sequence[str]], core: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which imports the parts of its package on first access.

    ``parts`` maps each part to the names it exports, and ``""`` to those that are modules themselves. The
    parts in ``core`` are imported together. Names are cached in the namespace.
    """
    package, module = namespace["__package__"], namespace["__name__"]
    part_of = {name: part or name for part, names in parts.items() for name in names}

    def load(name: str) -> Any:
        if name not in part_of:
            raise attribute_error(
                module.replace("distribute_jax", "dj"),
                f"module {module!r}",
                name,
                sys.modules.get(module),
            )
        # All names of a part are published: a user may get an object of a class that was never accessed.
        loaded: dict[str, Any] = {}
        for part in core if part_of[name] in core else (part_of[name],):
            members = vars(importlib.import_module(f"{package}.{part}"))
            loaded |= {each: members[each] for each in parts.get(part, ()) if each in members}
        imported = sys.modules[f"{package}.{part_of[name]}"]
        loaded[name] = imported if part_of[name] == name else getattr(imported, name)
        namespace.update(loaded)
        publish(namespace, loaded, module)
        return namespace[name]

    return checked(load)


def public_names(namespace: Mapping[str, Any]) -> list[str]:
    """Returns the sorted names that a public package re-exports."""
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "") != __name__
    )


def publish(namespace: dict[str, Any], names: Iterable[str], module: str) -> None:
    """Sets ``__module__`` of a public package's loaded names, and lets their arguments be checked.

    Names that the package lacks raise an AttributeError that says what to type instead.
    """
    for name in names:
        value = namespace.get(name)
        origin = str(getattr(value, "__module__", ""))
        package, *inner = origin.split(".")
        is_private = any(part.startswith("_") for part in inner)
        if package == "distribute_jax" and (is_private or origin == namespace["__name__"]):
            value.__module__ = module
            if isinstance(value, type):
                check_methods(value)
        if package == "distribute_jax" and isinstance(value, FunctionType):
            namespace[name] = checked(value)  # the same function wherever it is listed
            namespace[name].__module__ = value.__module__
    if namespace["__name__"] == module:
        namespace.setdefault("__getattr__", lazy_exports(namespace, {}))
        namespace.setdefault("__dir__", lambda: sorted(namespace["__all__"]))
