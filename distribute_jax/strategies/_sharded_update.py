"""Options that several strategies take: ``shard_optimizer_state`` and ``axis_name``."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA


def checked_sharding(given: Any, caller: str) -> bool:
    """Checks that the option is a bool."""
    if not isinstance(given, bool):
        raise ArgumentError(
            f"{caller}(shard_optimizer_state={given!r}): it is True, each replica keeps its share of the "
            "optimizer's state, or False, each keeps all of it."
        )
    return given


def checked_axis_name(name: Any, mesh: Mesh, caller: str) -> str:
    """Returns the name, which must be a new one beside those of the mesh, or that of the replicas' axis."""
    taken = [axis for axis in mesh.axis_names if axis != DATA]
    if not isinstance(name, str) or not name or name in taken:
        raise ArgumentError(
            f"{caller}(axis_name={name!r}): it must be a string"
            + (f" other than {', '.join(map(repr, taken))}." if taken else ".")
        )
    return name
