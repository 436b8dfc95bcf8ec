"""The lowerings of a step by name: ``shard_map`` and ``pmap``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from distribute_jax._errors import LoweringError
from distribute_jax._jax_private import with_packed_numbers
from distribute_jax._mesh import (
    DATA,
    cores_per_replica,
    inside_replica,
    manual_axes,
    outside_mesh,
    replicas_per_device,
)
from distribute_jax.program._jaxprs import RenamedAxis, names_axis
from distribute_jax.program._layout import FlatStep
from distribute_jax.program._options import Lowering

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(DATA)

Compiled = Callable[..., list[Any]]
Compile = Callable[[FlatStep], Compiled]


def maps_shards(mesh: Mesh) -> bool:
    """Returns whether a step is compiled through ``shard_map`` here.

    XLA's partitioner fails on a sum over a manual axis of size 1 beside automatic ones (JAX 0.10.2).
    """
    return mesh.shape[DATA] > 1 or mesh.size == 1


def compile_for_mesh(step: FlatStep, all_replicas: Compiled) -> Compiled:
    """Compiles a function of global arrays; XLA partitions what is not mapped over the mesh."""
    options = _compiler_options(step)
    jitted = jax.jit(
        all_replicas,
        in_shardings=step.shardings.in_shardings(step.mesh),
        out_shardings=step.shardings.out_shardings(step.mesh),
        donate_argnums=tuple(step.donated),
    )
    with outside_mesh():  # that of an open scope need not be the one that divides state
        jitted_trace = jitted.trace(*step.avals)
        if step.ahead is not None:
            ahead: Compiled = step.ahead.compile(jitted_trace, step.mesh.size, options)
            return ahead
        lowered = jitted_trace.lower()
    compiled: Compiled = with_packed_numbers(lowered.compile(options), step.avals)
    return compiled


def compile_shard_map(step: FlatStep) -> Compiled:
    """Compiles a step of one replica for the mesh; the result takes and gives flat global arrays."""
    if not maps_shards(step.mesh):
        return compile_for_mesh(step, _one_replica(step))
    mapped = jax.shard_map(
        step.function,
        mesh=step.mesh,
        in_specs=tuple(_SPLIT if split else _WHOLE for split in step.shardings.split),
        out_specs=[_WHOLE if same else _SPLIT for same in step.shardings.mirrored],
        axis_names=manual_axes(step.mesh),
        check_vma=False,
    )
    return compile_for_mesh(step, mapped)


def _compiler_options(step: FlatStep) -> dict[str, bool | str] | None:
    """Leaves out, on CPU, what pays for many calls only, and a pass that ends the process.

    It does in a bfloat16 sum beside automatic axes, which it would add up in float32 (seen on JAX 0.10.2
    and 0.12). Without it the CPU adds bfloat16 itself.
    """
    mesh, options = step.mesh, dict[str, bool | str]()
    if step.platform == "cpu":
        if manual_axes(mesh) != set(mesh.axis_names):
            options["xla_disable_hlo_passes"] = "all-reduce-promotion"
        if step.runs_once:
            options["xla_backend_optimization_level"] = "0"
    return options or None


def _one_replica(step: FlatStep) -> Compiled:
    """Returns the step of the only replica over the global arrays, which are its parts."""
    with jax.sharding.use_abstract_mesh(inside_replica(step.mesh)):
        body = jax.make_jaxpr(step.function, axis_env=[(DATA, 1)])(*step.avals)
    function: Compiled = jex_core.jaxpr_as_fun(without_axis(body))
    return function


def without_axis(body: Any) -> Any:
    """Returns the program of the only replica as one that does not name the axis of the replicas."""
    return _WithoutAxis(DATA, "").closed(body)


class _WithoutAxis(RenamedAxis):
    """Removes an axis of size 1. Only the collectives go through ``vmap``, not what it cannot batch."""

    def equation(self, eqn: Any) -> Any:
        """Returns what a collective over the axis computes as one equation that does not name it."""
        if not names_axis(eqn, DATA):
            return super().equation(eqn)
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        (call,) = jax.make_jaxpr(jax.jit(functools.partial(_over_one, eqn)))(*inputs).eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars)

    def effects(self, of: Any) -> Any:
        """Leaves out the effect of naming it."""
        return {e for e in of.effects if getattr(e, "name", None) != DATA}


def _over_one(eqn: Any, *values: jax.Array) -> Any:
    if eqn.params.get("perm") == ():  # a shift to the next replica, of which vmap wants one
        return list(map(jnp.zeros_like, values))
    groups = {"axis_index_groups": None} if "axis_index_groups" in eqn.params else {}

    def bound(_: Any, *values: jax.Array) -> Any:
        return eqn.primitive.bind(*values, **{**eqn.params, **groups})

    # All is batched: JAX's all_to_all of what is not has another shape (JAX 0.10.2).
    outs = jax.vmap(bound, axis_name=DATA)(jnp.zeros(1), *(x[None] for x in values))
    return jax.tree.map(lambda x: x[0], outs)


def _apart(array: Any, replicas: int) -> jax.Array:
    """Returns the replicas' parts, one after the other along dim 0, as a new dim."""
    return jnp.reshape(array, (replicas, array.shape[0] // replicas, *array.shape[1:]))


def compile_pmap(step: FlatStep) -> Compiled:
    """Compiles through ``jax.pmap``, which splits a leading dim; nothing is donated."""
    mesh, shardings = step.mesh, step.shardings
    cores, each = cores_per_replica(mesh), replicas_per_device(mesh)
    if cores > 1 or each > 1:
        what = f"on replicas of {cores} cores" if cores > 1 else f"with replicas_per_device={each}"
        raise LoweringError(
            f'RunOptions(lowering="pmap") cannot run a step {what}: pmap knows one '
            'device for each replica. Use RunOptions(lowering="shard_map"), the default.'
        )

    def unstacked(number: jax.Array, *flat: jax.Array) -> list[jax.Array]:
        del number  # pmap refuses a function of which no argument is split
        inputs = [x[None] if s else x for x, s in zip(flat, shardings.stacked, strict=True)]
        outs = step.function(*inputs)
        return [x if same else x[0] for x, same in zip(outs, shardings.mirrored, strict=True)]

    mapped = jax.pmap(
        unstacked,
        axis_name=DATA,
        in_axes=(0, *(0 if split else None for split in shardings.split)),
        out_axes=[None if same else 0 for same in shardings.mirrored],
        devices=list(mesh.devices.flat),
    )
    wanted = shardings.out_shardings(mesh)

    def compiled(*flat: Any) -> list[jax.Array]:
        with outside_mesh():
            inputs = [
                _apart(x, mesh.shape[DATA]) if split and not stacked else x
                for x, split, stacked in zip(flat, shardings.split, shardings.stacked, strict=True)
            ]
            outs = mapped(np.arange(mesh.shape[DATA]), *inputs)
            return [jax.device_put(x, to) for x, to in zip(outs, wanted, strict=True)]

    return compiled


COMPILERS: dict[Lowering, Compile] = {"shard_map": compile_shard_map, "pmap": compile_pmap}


def with_token(step: FlatStep) -> FlatStep:
    """Returns a step with one more output, the last, for a step of which all outputs are state.

    All outputs of a program are there at once, so a number that costs nothing tells when the state is,
    also when a later step has taken that. Without it the loop would wait for the newest step.
    """

    def and_token(*flat: Any) -> list[Any]:
        return [*step.function(*flat), jnp.ones((), jnp.uint32)]

    and_token.__name__ = "step"
    shardings = replace(step.shardings, mirrored=(*step.shardings.mirrored, True))
    return replace(step, function=and_token, shardings=shardings)
