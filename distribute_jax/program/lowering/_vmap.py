"""Lowering as a ``vmap`` over the replicas under one ``jit``: state need not be whole on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from distribute_jax._internals import with_packed_numbers
from distribute_jax._mesh import DATA, num_replicas
from distribute_jax.program.lowering._lower import Layouts
from distribute_jax.program.tracing._trace import Call


def compile_vmap(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    lies: Layouts,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles one program for the whole mesh, which XLA partitions by how its inputs lie."""
    mesh = call.mesh
    replicas = num_replicas(mesh)

    def one(*flat: jax.Array) -> list[jax.Array]:
        outs = one_replica(*flat)
        return [_any_copy(x) if same else x for x, same in zip(outs, lies.mirrored, strict=True)]

    mapped = jax.vmap(
        one,
        in_axes=tuple(0 if split else None for split in lies.split),
        out_axes=[None if same else 0 for same in lies.mirrored],
        axis_name=DATA,
        axis_size=replicas,
        spmd_axis_name=DATA,
    )

    def all_replicas(*flat: jax.Array) -> list[jax.Array]:
        inputs = [_apart(x, replicas) if s else x for x, s in zip(flat, lies.split, strict=True)]
        outs = mapped(*inputs)
        return [x if same else _joined(x) for x, same in zip(outs, lies.mirrored, strict=True)]

    jitted = jax.jit(
        all_replicas,
        in_shardings=lies.in_shardings(mesh),
        out_shardings=lies.out_shardings(mesh),
        donate_argnums=tuple(donated),
    )
    compiled: Callable[..., list[jax.Array]] = with_packed_numbers(
        jitted.lower(*avals).compile(), avals
    )
    return compiled


def _apart(array: jax.Array, replicas: int) -> jax.Array:
    """Gives the replicas' parts, which lie one after the other along dim 0, a dim of their own."""
    return array.reshape(replicas, array.shape[0] // replicas, *array.shape[1:])


def _joined(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


@jax.custom_batching.custom_vmap
def _any_copy(array: jax.Array) -> jax.Array:
    """Tells ``vmap`` that all replicas have this value, which it cannot see of every mirrored one."""
    return array


@_any_copy.def_vmap
def _first(axis_size: int, batched: list[bool], array: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, batched  # it is called for batched values only
    return array[0], False
