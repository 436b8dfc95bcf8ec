"""State on the mesh before the first step: mirrored where it is not, shared buffers told apart."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distribute_jax._errors import ArgumentError, MixedStrategiesError
from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import mirrored_sharding, num_replicas
from distribute_jax._tree import leaf_text, listed
from distribute_jax.program._bind import Binding


def place_state(binding: Binding, mesh: Mesh, *, warn: bool = True) -> None:
    """Mirrors every variable over the mesh, with one warning where state was made elsewhere."""
    whole = mirrored_sharding(mesh)
    raws = read_raw(binding.variables)
    _check_arrays(binding, raws)
    _check_unmixed(binding, raws, mesh)
    placed = [jax.tree.map(lambda leaf: _placed(leaf, whole), raw) for raw in raws]
    moved = [
        name
        for name, old, new in zip(binding.names, raws, placed, strict=True)
        if any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    ]
    write_raw(binding.variables, placed)
    if moved and warn and num_replicas(mesh) > 1:
        warnings.warn(_OUTSIDE.format(n=len(moved), lines=listed(moved, 3)), stacklevel=5)


def _placed(leaf: Any, whole: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.sharding.is_equivalent_to(whole, leaf.ndim):
            return leaf
        # The part that stays on its device would share the memory of an array that the user may hold
        # elsewhere, also in another variable, and state is given away to the step.
        return jnp.copy(jax.device_put(leaf, whole))
    return jax.device_put(jnp.asarray(leaf), whole)


def _check_unmixed(binding: Binding, raws: list[Any], mesh: Mesh) -> None:
    """Refuses state that lies mirrored over the devices of another strategy."""
    bad = [
        f"{name}: mirrored over {_devices(mixed[0].sharding.mesh)}"
        for name, raw in zip(binding.names, raws, strict=True)
        if (mixed := [leaf for leaf in jax.tree.leaves(raw) if _is_mirrored_elsewhere(leaf, mesh)])
    ]
    if bad:
        raise MixedStrategiesError(_MIXED.format(mesh=_devices(mesh), lines=listed(bad)))


def _is_mirrored_elsewhere(leaf: Any, mesh: Mesh) -> bool:
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return False
    other = leaf.sharding.mesh
    alike = other.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    return other.size > 1 and not alike and leaf.sharding.is_fully_replicated


def _devices(mesh: Any) -> str:
    return "[" + ", ".join(map(str, mesh.devices.flat)) + "]"


def _check_arrays(binding: Binding, raws: list[Any]) -> None:
    bad = [
        f"{name}: {leaf_text(leaf)}"
        for name, raw in zip(binding.names, raws, strict=True)
        for leaf in jax.tree.leaves(raw)
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))
    ]
    if bad:
        raise ArgumentError(
            f"strategy.run found variables that hold no array:\n{listed(bad)}\nThe state of a step "
            "is made of arrays and numbers. Keep other values as plain attributes of the module."
        )


_MIXED = """\
strategy.run on the devices {mesh} got variables that were made under another strategy:
{lines}
A model belongs to one strategy: run the step with the one whose scope it was made under, or build it \
again under this one. To move it for good: nnx.update(model, jax.device_put(nnx.state(model), \
NamedSharding(strategy.mesh, PartitionSpec())))"""

_OUTSIDE = """\
{n} variables were made outside of strategy.scope() and are now mirrored over its devices:
{lines}
Build the model and the optimizer inside `with strategy.scope():`, so that they are placed at once."""
