"""Lowering: the traced step becomes a compiled program over flat, placed arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from distribute_jax._mesh import DATA, mirrored_sharding, outside_mesh, split_sharding
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import Combine, combined
from distribute_jax.program._plan import Plan
from distribute_jax.program._sync_marks import ClosedJaxpr
from distribute_jax.program._trace import Call, Traced, abstract

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(DATA)


@dataclass(frozen=True, eq=False)
class Layouts:
    """How each flat input and output lies on the mesh."""

    stacked: tuple[bool, ...]
    """For each input: it has a leading dim for the replicas, of size 1 inside one."""
    split: tuple[bool, ...]
    """For each input: it is divided along dim 0."""
    mirrored: tuple[bool, ...]
    """For each output: it is whole on every replica."""


def layouts(call: Call, traced: Traced, plan: Plan) -> Layouts:
    """Says how inputs and outputs lie on the mesh."""
    variables, arrays, _, counts = traced.sizes
    whole = [False] * (variables + arrays)
    batch = [isinstance(value, PerReplica) for value in call.arguments.data]
    stacked = [
        b and v.layout is Layout.STACKED for b, v in zip(batch, call.arguments.data, strict=True)
    ]
    more = [False] * counts
    return Layouts(
        stacked=(*whole, *stacked, *more),
        split=(*whole, *batch, *more),
        mirrored=(*(True for _ in plan.combine), *plan.mirrored),
    )


def used_inputs(traced: Traced) -> list[bool]:
    """Tells for each flat input whether the program reads it or hands it on."""
    jaxpr = traced.jaxpr.jaxpr
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jex_core.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    return [v in read for v in jaxpr.invars]


def replica_function(
    traced: Traced, plan: Plan, lies: Layouts, arrays: Sequence[Any]
) -> Callable[..., list[jax.Array]]:
    """Gives the program of one replica over all flat inputs, as ``shard_map`` will call it."""
    state = len(plan.combine)
    old = _old_inputs(traced)
    first_array = traced.sizes[0]
    # Arrays captured where nothing can be assigned are constants of the trace: read them as inputs.
    at = {id(array): first_array + i for i, array in enumerate(arrays)}

    def one_replica(*flat: jax.Array) -> list[jax.Array]:
        inputs = [x[0] if stacked else x for x, stacked in zip(flat, lies.stacked, strict=True)]
        consts = [inputs[at[id(c)]] if id(c) in at else c for c in traced.jaxpr.consts]
        outs = jex_core.jaxpr_as_fun(ClosedJaxpr(traced.jaxpr.jaxpr, consts))(*inputs)
        new = [
            combined(rule, out, inputs[old[i]])
            if rule is Combine.INCREMENTS
            else combined(rule, out, out)
            for i, (rule, out) in enumerate(zip(plan.combine, outs[:state], strict=True))
        ]
        for merge in plan.merges:
            before = [inputs[old[k]] for k in merge.outputs]
            merged = merge.combined([outs[k] for k in merge.outputs], before)
            for k, value in zip(merge.outputs, merged, strict=True):
                new[k] = value
        return new + [
            out if mirrored else out[None]
            for out, mirrored in zip(outs[state:], plan.mirrored, strict=True)
        ]

    return one_replica


def _old_inputs(traced: Traced) -> list[int]:
    """Gives, for each state output, the flat input that held the old value, where it has one."""
    starts = traced.input_starts
    return [
        starts[index] + k
        for index, size in zip(traced.written, traced.written_sizes, strict=True)
        for k in range(size)
    ]


def compile_shard_map(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    lies: Layouts,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles for the mesh; the result takes and gives flat global arrays."""
    mesh = call.mesh
    mapped = jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=tuple(_SPLIT if split else _WHOLE for split in lies.split),
        out_specs=[_WHOLE if mirrored else _SPLIT for mirrored in lies.mirrored],
        axis_names={DATA},
        check_vma=False,
    )
    whole, split = mirrored_sharding(mesh), split_sharding(mesh)
    jitted = jax.jit(
        mapped,
        in_shardings=tuple(split if s else whole for s in lies.split),
        out_shardings=[whole if m else split for m in lies.mirrored],
        donate_argnums=tuple(donated),
    )
    compiled: Callable[..., list[jax.Array]] = jitted.lower(*avals).compile()
    return compiled


def compile_pmap(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    lies: Layouts,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles through ``jax.pmap``, which splits a leading dim; for comparison only."""
    del avals, donated
    mesh = call.mesh
    replicas = mesh.shape[DATA]

    def unstacked(*flat: jax.Array) -> list[jax.Array]:
        again = [x[None] if stacked else x for x, stacked in zip(flat, lies.stacked, strict=True)]
        outs = one_replica(*again)
        return [x if whole else x[0] for x, whole in zip(outs, lies.mirrored, strict=True)]

    mapped = jax.pmap(
        unstacked,
        axis_name=DATA,
        in_axes=tuple(0 if split else None for split in lies.split),
        out_axes=[None if whole else 0 for whole in lies.mirrored],
        devices=list(mesh.devices.flat),
    )
    whole, split = mirrored_sharding(mesh), split_sharding(mesh)

    def compiled(*flat: Any) -> list[jax.Array]:
        with outside_mesh():
            inputs = [
                _with_replica_dim(x, replicas) if s and not stacked else x
                for x, s, stacked in zip(flat, lies.split, lies.stacked, strict=True)
            ]
            outs = mapped(*inputs)
            return [
                jax.device_put(x, whole if m else split)
                for x, m in zip(outs, lies.mirrored, strict=True)
            ]

    return compiled


def _with_replica_dim(array: Any, replicas: int) -> jax.Array:
    return jnp.reshape(array, (replicas, array.shape[0] // replicas, *array.shape[1:]))


def input_avals(call: Call, traced: Traced) -> list[Any]:
    """Gives the abstract value of each flat global input."""
    values: list[Any] = [v.get_raw_value() for v in call.binding.variables]
    values += [place.get() for _, place, _ in call.binding.arrays]
    avals = jax.tree.leaves([abstract(value) for value in values])
    for value in call.arguments.data:
        avals.append(abstract(value.global_array if isinstance(value, PerReplica) else value))
    replicas = call.mesh.shape[DATA]
    return avals + [jax.ShapeDtypeStruct((replicas,), jnp.int32)] * traced.sizes[3]
