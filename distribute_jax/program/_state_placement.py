"""Where state is stored: mirrored over the mesh, sharded over the replicas, or on one device.

In a sharded update a leaf is divided along its largest dim that the number of replicas divides. One without
such a dim stays whole on each replica: padding it would change what an optax transformation sees of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from distribute_jax._errors import ArgumentError, MixedStrategiesError
from distribute_jax._jax_private import read_raw, uncommitted, write_raw
from distribute_jax._mesh import DATA, mirrored_sharding, num_replicas, outside_mesh, put
from distribute_jax._messages import is_donated, leaf_text, listed
from distribute_jax._user_frames import warn_user
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._binding import Binding
from distribute_jax.program._layout import FlatStep
from distribute_jax.program._lowerings import Compile, Compiled
from distribute_jax.variables import Variable, on_replicas


def place_state(
    binding: Binding,
    replicas: Replicas,
    *,
    keeps: Callable[[nnx.Variable[Any]], bool],
    warn: bool,
) -> None:
    """Places every variable where state is stored; maybe with one warning where it was made elsewhere.

    A variable that ``keeps`` selects stays sharded over the mesh, if it is.
    """
    mesh, wanted = replicas.mesh, replicas.state
    raws = read_raw(binding.variables)
    _check_state(binding, raws, mesh)

    placed, moved = [], []
    for variable, name, raw in zip(binding.variables, binding.names, raws, strict=True):
        if keeps_own_values(variable):
            placed.append(on_replicas(cast("Variable", variable), mesh))
            continue
        leaves, treedef = jax.tree.flatten(raw)
        new = [
            leaf if keeps(variable) and _over_mesh(leaf, mesh) else _placed(leaf, wanted)
            for leaf in leaves
        ]
        placed.append(jax.tree.unflatten(treedef, new))
        if any(map(operator.is_not, leaves, new)):
            moved.append((name, leaves))
    write_raw(binding.variables, placed)
    if moved and warn and num_replicas(mesh) > 1:
        _warn(moved, mesh, replicas.parameter_device)


def kept_shardings(binding: Binding, mesh: Mesh) -> tuple[NamedSharding | None, ...]:
    """Returns how each leaf of state that all replicas see is sharded over the mesh; else None."""
    return tuple(
        None if keeps_own_values(variable) else _over_mesh(leaf, mesh)
        for variable in binding.variables
        for leaf in jax.tree.leaves(variable.get_raw_value())
    )


def _over_mesh(leaf: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding of an array that is divided over just this mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    other = sharding.mesh
    same = other.axis_names == mesh.axis_names and other.devices.tolist() == mesh.devices.tolist()
    return NamedSharding(mesh, sharding.spec) if same else None


def _placed(leaf: Any, wanted: Sharding) -> Any:
    if isinstance(leaf, jax.Array):
        # What was donated is refused by name if the step reads it.
        if is_donated(leaf) or leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            return leaf
        return put(fresh_copy(leaf), wanted)
    return put(jnp.asarray(leaf), wanted)


def fresh_copy(leaf: jax.Array) -> jax.Array:
    """Copies an array that is about to move.

    A part that stays on its device keeps its memory, even with may_alias=False, which then belongs to an
    array that the user may hold elsewhere, also in another variable; and state is donated to the step.
    What is stored in other memory than computations use is copied when it moves.
    """
    device: Any = next(iter(leaf.sharding.device_set))
    if leaf.sharding.memory_kind not in (None, device.default_memory().kind):
        return leaf
    with outside_mesh():
        return jnp.copy(leaf)


def _warn(
    moved: Sequence[tuple[str, list[Any]]], mesh: Mesh, parameter_device: ParameterDevice | None
) -> None:
    """Warns of state that was elsewhere; other memory of the right device is no other place."""
    sharded, outside = [], []
    for name, leaves in moved:
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        if any(_over_mesh(array, mesh) for array in arrays):
            sharded.append(name)
        elif parameter_device is None or any(
            array.devices() != {parameter_device.device} for array in arrays
        ):
            outside.append(name)
    where = "are mirrored over its devices"
    if parameter_device is not None:
        where = f"are stored on {parameter_device.device}"
    for text, names in ((_SHARDED, sharded), (_OUTSIDE, outside)):
        if names:
            warn_user(text.format(n=len(names), lines=listed(names, 3), where=where))


def _check_state(binding: Binding, raws: list[Any], mesh: Mesh) -> None:
    """Refuses state that is not arrays, or is mirrored over the devices of another strategy."""
    others: list[str] = []
    mixed: dict[str, str] = {}
    for name, raw in zip(binding.names, raws, strict=True):
        for leaf in jax.tree.leaves(raw):
            if (other := _other_mesh(leaf, mesh)) is not None:
                mixed[name] = f"{name}: mirrored over {_devices(other)}"
            elif not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
                others.append(f"{name}: {leaf_text(leaf)}")
    if others:
        raise ArgumentError(
            f"strategy.run found variables that hold no array:\n{listed(others)}\nThe state of a step "
            "is made of arrays and numbers. Keep other values as plain attributes of the module."
        )
    if mixed:
        lines = listed(list(mixed.values()))
        raise MixedStrategiesError(_MIXED.format(mesh=_devices(mesh), lines=lines))


def _other_mesh(leaf: Any, mesh: Mesh) -> Any:
    """Returns the mesh of other devices that an array is mirrored over."""
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return None
    other = leaf.sharding.mesh
    same = other.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    return other if other.size > 1 and not same and leaf.sharding.is_fully_replicated else None


def _devices(mesh: Any) -> str:
    return "[" + ", ".join(map(str, mesh.devices.flat)) + "]"


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
This strategy keeps them whole."""


@dataclass(frozen=True)
class ParameterDevice:
    """The one device, and the kind of its memory, where state is stored between steps."""

    device: jax.Device
    memory_kind: str | None = None
    """As ``device.addressable_memories()`` names it; None for the device's default memory."""

    @property
    def state(self) -> SingleDeviceSharding:
        """Where variables are stored."""
        return SingleDeviceSharding(self.device, memory_kind=self.memory_kind)

    @property
    def results(self) -> SingleDeviceSharding:
        """Where mirrored results are stored: in memory that any computation can read."""
        return SingleDeviceSharding(self.device)


@dataclass(frozen=True)
class Replicas:
    """Where the replicas of a strategy are, and where their state is stored between steps."""

    mesh: Mesh
    parameter_device: ParameterDevice | None = None
    """None where state is mirrored over the mesh."""
    share_state: bool = False
    """Whether the replicas share the state of optimizers, rather than all hold it."""

    @property
    def state(self) -> Sharding:
        """Where state is stored that is not sharded."""
        if self.parameter_device is not None:
            return self.parameter_device.state
        return mirrored_sharding(self.mesh)


def on_parameter_device(compile_on_mesh: Compile, parameter_device: ParameterDevice) -> Compile:
    """Returns a lowering whose programs take and leave on one device what is mirrored."""
    return lambda step: _sending(compile_on_mesh(step), parameter_device, step)


def _sending(compiled: Compiled, parameter_device: ParameterDevice, step: FlatStep) -> Compiled:
    """Sends the inputs, runs the program, and fetches one replica's copy of what is mirrored."""
    mesh, shardings, donated = step.mesh, step.shardings, tuple(step.donated)
    wanted = shardings.in_shardings(mesh)
    devices = [
        d for d in mesh.devices.flat if d.process_index == parameter_device.device.process_index
    ]
    near = devices.index(parameter_device.device) if parameter_device.device in devices else 0
    fetched = [i for i, mirrored in enumerate(shardings.mirrored) if mirrored]
    to = [
        parameter_device.state if i < shardings.state else parameter_device.results for i in fetched
    ]

    def run(*flat: Any) -> list[Any]:
        outs = list(compiled(*_sent(flat, wanted)))
        for i in donated:
            if isinstance(flat[i], jax.Array):
                flat[i].delete()  # what was sent is used up, and the new value needs the room
        copies = jax.device_put([outs[i].addressable_data(near) for i in fetched], to)
        for i, copy in zip(fetched, copies, strict=True):
            outs[i] = copy if i < shardings.state else uncommitted(copy)
        return outs

    return run


def _sent(flat: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """Puts every array where the program takes it, in one call; numbers stay as they are."""
    arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
    there = jax.device_put([flat[i] for i in arrays], [wanted[i] for i in arrays])
    sent = list(flat)
    for i, array in zip(arrays, there, strict=True):
        sent[i] = array
    return sent


LEAST_ELEMENTS = 1024
"""Smaller arrays stay whole: what they take is nothing beside the collectives that sharing them costs."""


def share_dim(shape: Sequence[int], replicas: int) -> int | None:
    """Returns the dim along which an array is divided; None where it stays whole."""
    fits = [dim for dim, size in enumerate(shape) if size and size % replicas == 0]
    if replicas == 1 or not fits or prod(shape) < LEAST_ELEMENTS:
        return None
    return max(fits, key=lambda dim: shape[dim])


def share_spec(dim: int | None) -> PartitionSpec:
    """Returns the placement of an array that is divided along a dim, or whole."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, DATA)


def share_sharding(value: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding of the shares of an array; None where it stays replicated."""
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    dim = share_dim(shape, num_replicas(mesh))
    return None if dim is None else NamedSharding(mesh, share_spec(dim))


def is_shared(variable: nnx.Variable[Any]) -> bool:
    """Returns whether the replicas share a variable: the state of an optimizer."""
    return isinstance(variable, nnx.OptState)


def divide_state(binding: Binding, mesh: Mesh) -> None:
    """Leaves each replica its share of the optimizer's state; nothing keeps the whole arrays."""
    shared = [variable for variable in binding.variables if is_shared(variable)]

    def divided(leaf: Any) -> Any:
        to = share_sharding(leaf, mesh)
        if to is None or is_donated(leaf) or leaf.sharding.is_equivalent_to(to, leaf.ndim):
            return leaf
        return put(leaf, to)

    for variable, raw in zip(shared, read_raw(shared), strict=True):
        write_raw([variable], [jax.tree.map(divided, raw)])
