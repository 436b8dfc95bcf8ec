"""Type names that several folders share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A nest of containers that ``jax.tree`` understands."""

KeyPath: TypeAlias = tuple[Any, ...]
"""Where a leaf stands in a tree, as ``jax.tree_util`` gives it."""

StepFunction: TypeAlias = Callable[..., Any]
"""A function written for one replica."""

Kwargs: TypeAlias = Mapping[str, Any]
