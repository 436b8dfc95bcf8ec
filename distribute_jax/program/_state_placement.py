"""Moves state to where a strategy stores it: replicated or sharded over the mesh, or on one device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding

from distribute_jax import _context
from distribute_jax._errors import (
    ArgumentError,
    DonatedError,
    MixedStrategiesError,
    log_once,
    warn_user,
)
from distribute_jax._jax_private import read_raw, uncommitted, write_raw
from distribute_jax._mesh import num_replicas, outside_mesh, put
from distribute_jax._messages import is_donated, leaf_text, listed, path_text
from distribute_jax._values import PerReplica
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._binding import Binding, step_lock
from distribute_jax.program._lowerings import Compile, Compiled, FlatStep
from distribute_jax.program._placement import ParameterDevice, Replicas
from distribute_jax.variables import Variable, on_replicas


def place_state(
    binding: Binding, replicas: Replicas, shardings: Sequence[NamedSharding | None], *, warn: bool
) -> None:
    """Places every variable; with ``warn``, warns of those that were made elsewhere.

    A leaf that has its sharding of ``shardings`` already keeps it; all others are replicated.
    """
    mesh, divided = replicas.mesh, iter(shardings)
    raws = read_raw(binding.variables)
    check_arrays(binding)
    _check_one_strategy(binding, raws, mesh)
    placed, moved = [], []
    for variable, name, raw in zip(binding.variables, binding.names, raws, strict=True):
        leaves, treedef = jax.tree.flatten(raw)
        to = list(itertools.islice(divided, len(leaves)))
        if keeps_own_values(variable):
            placed.append(on_replicas(cast("Variable", variable), mesh))
            continue
        rest = [replicas.state(np.shape(leaf)) for leaf in leaves]
        new = list(map(_placed, leaves, rest, to))
        placed.append(jax.tree.unflatten(treedef, new))
        if any(map(operator.is_not, leaves, new)):
            moved.append((name, leaves))
    write_raw(binding.variables, placed)
    if moved and warn and num_replicas(mesh) > 1:
        _warn(moved, replicas.parameter_device)


def _is_placed(leaf: Any, to: Sharding | None) -> bool:
    """True if an array has a sharding, or was donated: that is refused by name if the step reads it."""
    return isinstance(leaf, jax.Array) and (
        is_donated(leaf) or (to is not None and leaf.sharding.is_equivalent_to(to, leaf.ndim))
    )


def _placed(leaf: Any, to: Sharding, divided: Sharding | None) -> Any:
    if _is_placed(leaf, divided) or _is_placed(leaf, to):
        return leaf
    return put(fresh_copy(leaf) if isinstance(leaf, jax.Array) else jnp.asarray(leaf), to)


def fresh_copy(leaf: jax.Array) -> jax.Array:
    """Copies an array before it moves.

    ``device_put`` reuses the buffer of a shard that stays on its device, even with ``may_alias=False``. State
    is donated to the step, and the user may hold the old array. An array in other than the device's default
    memory is copied by the move.
    """
    device: Any = next(iter(leaf.sharding.device_set))
    if leaf.sharding.memory_kind not in (None, device.default_memory().kind):
        return leaf
    with outside_mesh():
        return jnp.copy(leaf)


def _warn(moved: Sequence[tuple[str, list[Any]]], parameter_device: ParameterDevice | None) -> None:
    """Warns of state that was stored on other devices; another memory of the right device is fine."""
    sharded, outside = [], []
    device = None if parameter_device is None else parameter_device.device
    for name, leaves in moved:
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        if not all(array.is_fully_replicated for array in arrays):
            sharded.append(name)
        elif device is None or any(array.devices() != {device} for array in arrays):
            outside.append(name)
    where = "are mirrored over its devices" if device is None else f"are stored on {device}"
    for text, names in ((_SHARDED, sharded), (_OUTSIDE, outside)):
        if names:
            warn_user(text.format(n=len(names), lines=listed(names, 3), where=where))


_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def check_arrays(binding: Binding, *more: type) -> None:
    """Raises ArgumentError for state that is neither an array nor of one of ``more`` types."""
    # An ON_READ variable of a returned state has the components of all replicas.
    held = [
        (name, jax.tree.leaves(raw) if keeps_own_values(variable) else raw)
        for name, variable, raw in zip(
            binding.names, binding.variables, read_raw(binding.variables), strict=True
        )
    ]
    held += [(name, place.get()) for name, place, root in binding.arrays if root is None]
    others = [
        f"{name}: {leaf_text(leaf)}"
        for name, raw in held
        for leaf in jax.tree.leaves(raw, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
        if not isinstance(leaf, (*_ARRAYS, *more))
    ]
    if others:
        raise ArgumentError(
            f"strategy.run found variables that hold no array:\n{listed(others)}\nThe state of a step "
            "is made of arrays and numbers. Keep other values as plain attributes of the module; pass a "
            "PerReplica result in args without its variables, as nnx.to_pure_dict(state)."
        )


def _check_one_strategy(binding: Binding, raws: list[Any], mesh: Mesh) -> None:
    """Raises MixedStrategiesError for state on the devices of another strategy."""
    mixed, here = {}, _devices(mesh)
    for name, raw in zip(binding.names, raws, strict=True):
        for leaf in jax.tree.leaves(raw):
            to = leaf.sharding if isinstance(leaf, jax.Array) else None
            other = to.mesh if isinstance(to, NamedSharding) and to.mesh.size > 1 else mesh
            if other is not mesh and (there := _devices(other)) != here:
                mixed[name] = f"{name}: stored on {there}"
    if mixed:
        lines = listed(list(mixed.values()))
        raise MixedStrategiesError(_MIXED.format(mesh=here, lines=lines))


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
{n} variables were sharded over the devices, and are now replicated:
{lines}
This strategy replicates them."""


def on_parameter_device(compile_on_mesh: Compile, parameter_device: ParameterDevice) -> Compile:
    """Returns a lowering whose programs take mirrored values from one device, and return them there.

    Such a program gets the inputs sent, and one replica's copy of each mirrored output is fetched.
    """
    device = parameter_device.device

    def compile_step(step: FlatStep) -> Compiled:
        compiled, shardings, donated = compile_on_mesh(step), step.shardings, tuple(step.donated)
        wanted, state = shardings.in_shardings(step.mesh), shardings.state
        devices = [d for d in step.mesh.devices.flat if d.process_index == device.process_index]
        near = devices.index(device) if device in devices else 0
        fetched = [i for i, mirrored in enumerate(shardings.mirrored) if mirrored]

        def run(*flat: Any) -> list[Any]:
            outs = list(compiled(*_sent(flat, wanted)))
            for i in donated:
                if isinstance(flat[i], jax.Array):
                    flat[i].delete()  # its copies were donated, and the new value needs the memory
            to = [parameter_device.state(outs[i].shape if i < state else ()) for i in fetched]
            copies = jax.device_put([outs[i].addressable_data(near) for i in fetched], to)
            for i, copy in zip(fetched, copies, strict=True):
                outs[i] = copy if i < state else uncommitted(copy)
            return outs

        return run

    return compile_step


def _sent(flat: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """Moves every array to the program's sharding, in one call; Python numbers stay."""
    arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
    there = jax.device_put([flat[i] for i in arrays], [wanted[i] for i in arrays])
    sent = dict(zip(arrays, there, strict=True))
    return [sent.get(i, x) for i, x in enumerate(flat)]


LARGE_STATE = 1 << 30
"""Bytes that are logged if they were replicated before they are divided."""
_LARGE = (
    "%.1f GiB of state were created on every device, and are now divided among them. Make the model "
    "with strategy.create(lambda: Model(...)), so that no device holds all of it."
)


def divide_state(binding: Binding, shardings: Sequence[NamedSharding | None]) -> None:
    """Shards divided state, and drops the whole arrays one variable after the other."""
    parts, total = iter(shardings), 0

    def divided(leaf: Any) -> Any:
        to = next(parts)
        return leaf if to is None or _is_placed(leaf, to) else put(leaf, to)

    for variable, raw in zip(binding.variables, read_raw(binding.variables), strict=True):
        new = jax.tree.map(divided, raw)
        pairs = zip(jax.tree.leaves(raw), jax.tree.leaves(new), strict=True)
        if moved := sum(old.nbytes for old, there in pairs if old is not there):
            write_raw([variable], [new])
            total += moved
    if total > LARGE_STATE:
        log_once(_LARGE, total / 2**30)


_DONATED = """\
dj.snapshot got arrays that were donated before, so they cannot be copied any more:
{lines}
Take a snapshot before the call that they are donated to: kept = dj.snapshot(state)."""


def snapshot(tree: Any) -> Any:
    """Copies the arrays of a model, an optimizer or a pytree, so that no later step reuses their memory.

    ``run`` copies an array that it would donate only if something beside its variable refers to it; a
    snapshot copies all at once. A thread other than that of the steps may take one too: it waits for the
    step that is being dispatched, and all arrays are of the same step.

    Args:
        tree: an NNX object, or a pytree of arrays (global view).

    Returns:
        For an NNX object its ``nnx.State``, which ``nnx.update(model, state)`` puts back; for a pytree
        the pytree. All arrays are copies with the same placement. Of several objects pass
        ``nnx.state((model, optimizer))``, which is put back likewise.

    Raises:
        DonatedError: the arrays were donated before.
        RuntimeError: called by a source of batches, in the thread that reads ahead of the loop.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Param(jnp.zeros(2))
        >>> kept = dj.snapshot(model)
        >>> model[...] += 1
        >>> kept[...].tolist(), model[...].tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    _context.require_loop_thread("dj.snapshot")
    with step_lock:  # a step of another thread would take some of the arrays, or hold tracers
        state = nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree
        pairs = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if donated := [path_text(k) for k, x in pairs if any(map(is_donated, jax.tree.leaves(x)))]:
            raise DonatedError(_DONATED.format(lines=listed(donated)))
        return jax.tree.map(_copied, state)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
