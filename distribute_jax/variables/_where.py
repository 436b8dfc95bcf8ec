"""Where the code stands, as a variable sees it: on a replica, in a step, under another strategy."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from distribute_jax import _context
from distribute_jax._errors import MixedStrategiesError
from distribute_jax._internals import at_top_level
from distribute_jax._mesh import outside_mesh
from distribute_jax.variables._components import made_anew


def inside_replica() -> bool:
    """Tells whether the code runs as one replica."""
    top = _context.entered()
    return top is not None and top.replica is not None


def inside_run() -> bool:
    """Tells whether the raw value is one replica's: inside ``run``, ``merge_call`` included."""
    top = _context.entered()
    return top is not None and (top.replica is not None or (top.merging and not at_top_level()))


def readable_here(raw: Any) -> Any:
    """Gives a value that computes under the strategy that is current, though it lies on another's devices.

    To read another strategy's variable is allowed, as in TensorFlow; JAX would not add its value to one
    of the mesh that the scope has set. What no process holds whole is left to who combines it.
    """
    if _mesh_elsewhere(raw) is None or not (raw.is_fully_addressable or raw.is_fully_replicated):
        return raw
    with outside_mesh():
        return made_anew(raw)


def require_own(raw: Any, name: str) -> None:
    """Raises where code under one strategy writes a variable of another.

    One that lies on a single device is taken for one made under no strategy, as ``run`` takes it.
    """
    mesh = _mesh_elsewhere(raw)
    if mesh is None or mesh.size == 1:
        return
    current = _context.current().strategy
    raise MixedStrategiesError(
        f"Variable {name!r} was written under {current!r}, but it was made under another strategy, over "
        f"[{', '.join(map(str, mesh.devices.flat))}]. Mixing different tf.distribute.Strategy objects: "
        "reading it there is allowed, writing is not. Leave this scope before assigning it, or make a "
        "variable of this strategy's own with dj.Variable(other.numpy())."
    )


def _mesh_elsewhere(raw: Any) -> Mesh | None:
    """Gives the mesh of a value that lies on other devices than those of the current strategy."""
    top = _context.entered()
    if top is None or not isinstance(raw, jax.Array) or isinstance(raw, jax.core.Tracer):
        return None
    sharding = raw.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or mesh == top.strategy.mesh:
        return None
    own = top.strategy.mesh.devices.flat
    return None if mesh.devices.flatten().tolist() == list(own) else mesh
