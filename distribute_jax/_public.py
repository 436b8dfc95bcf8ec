"""Public names say where users import them from, in tracebacks, reprs and documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def publish(namespace: dict[str, Any], names: Iterable[str], module: str) -> None:
    """Sets ``__module__`` of functions and classes that are listed in a public package and loaded."""
    for name in names:
        value = namespace.get(name)
        if _is_inside(value):
            value.__module__ = module


def _is_inside(value: Any) -> bool:
    parts = str(getattr(value, "__module__", "")).split(".")
    return parts[0] == "distribute_jax" and any(part.startswith("_") for part in parts)
