"""State in its place before the first step: mirrored over the mesh, or wherever a strategy keeps it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding

from distribute_jax._errors import ArgumentError, MixedStrategiesError
from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import mirrored_sharding, num_replicas, outside_mesh, put
from distribute_jax._tree import is_given_away, leaf_text, listed
from distribute_jax.program.binding._aggregation import keeps_own_values
from distribute_jax.program.binding._bind import Binding
from distribute_jax.program.lowering._home import Home
from distribute_jax.variables import Variable, on_replicas


def place_state(
    binding: Binding,
    mesh: Mesh,
    home: Home | None,
    *,
    keeps: Callable[[nnx.Variable[Any]], bool],
    warn: bool,
) -> None:
    """Puts every variable where state lies, with one warning where it was made elsewhere.

    Args:
        binding: whose variables.
        mesh: where the replicas lie.
        home: where state lies between steps; None for mirrored over the mesh.
        keeps: tells whether a variable that is sharded over the mesh stays so.
        warn: whether to warn.
    """
    wanted = home.state if home else mirrored_sharding(mesh)
    raws = read_raw(binding.variables)
    _check_arrays(binding, raws)
    _check_unmixed(binding, raws, mesh)

    def place(variable: nnx.Variable[Any], raw: Any) -> Any:
        kept = keeps(variable)
        return jax.tree.map(
            lambda leaf: leaf if kept and _over_mesh(leaf, mesh) else _placed(leaf, wanted), raw
        )

    placed = [
        on_replicas(cast("Variable", variable), mesh)
        if keeps_own_values(variable)
        else place(variable, raw)
        for variable, raw in zip(binding.variables, raws, strict=True)
    ]
    moved = [
        (name, old)
        for variable, name, old, new in zip(
            binding.variables, binding.names, raws, placed, strict=True
        )
        if not keeps_own_values(variable)
        and any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    ]
    write_raw(binding.variables, placed)
    if moved and warn and num_replicas(mesh) > 1:
        _warn(moved, mesh, home)


def kept_shardings(binding: Binding, mesh: Mesh) -> tuple[NamedSharding | None, ...]:
    """Gives, for each leaf of each variable, how it is sharded over the mesh; None where it is whole."""
    leaves = jax.tree.leaves(read_raw(binding.variables))
    return tuple(_over_mesh(leaf, mesh) for leaf in leaves)


def _over_mesh(leaf: Any, mesh: Mesh) -> NamedSharding | None:
    """Gives the sharding of an array that is divided over just this mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    theirs = sharding.mesh
    same = theirs.axis_names == mesh.axis_names and theirs.devices.tolist() == mesh.devices.tolist()
    return NamedSharding(mesh, sharding.spec) if same else None


def _placed(leaf: Any, wanted: Sharding) -> Any:
    if isinstance(leaf, jax.Array):
        # What was given away is refused by name if the step reads it.
        if is_given_away(leaf) or leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            return leaf
        return put(own_copy(leaf), wanted)
    return put(jnp.asarray(leaf), wanted)


def own_copy(leaf: jax.Array) -> jax.Array:
    """Copies an array that is about to move.

    A part that stays on its device keeps its memory, even with may_alias=False, which then belongs to an
    array that the user may hold elsewhere, also in another variable; and state is given away to the step.
    What lies in other memory than computations use is copied when it moves.
    """
    device: Any = next(iter(leaf.sharding.device_set))
    if leaf.sharding.memory_kind not in (None, device.default_memory().kind):
        return leaf
    with outside_mesh():
        return jnp.copy(leaf)


def _warn(moved: Sequence[tuple[str, Any]], mesh: Mesh, home: Home | None) -> None:
    """Tells of state that was elsewhere; other memory of the right device is no other place."""
    sharded, outside = [], []
    for name, raw in moved:
        leaves = [leaf for leaf in jax.tree.leaves(raw) if isinstance(leaf, jax.Array)]
        if any(_over_mesh(leaf, mesh) for leaf in leaves):
            sharded.append(name)
        elif home is None or any(leaf.devices() != {home.device} for leaf in leaves):
            outside.append(name)
    if sharded:
        warnings.warn(_SHARDED.format(n=len(sharded), lines=listed(sharded, 3)), stacklevel=7)
    if outside:
        where = f"lie on {home.device}" if home else "are mirrored over its devices"
        text = _OUTSIDE.format(n=len(outside), lines=listed(outside, 3), where=where)
        warnings.warn(text, stacklevel=7)


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
{n} variables were made outside of strategy.scope() and now {where}:
{lines}
Build the model and the optimizer inside `with strategy.scope():`, so that they are placed at once."""

_SHARDED = """\
{n} variables were sharded over the replicas, and are now whole on each:
{lines}
This lowering needs them whole. RunOptions(lowering="vmap") keeps them sharded."""
