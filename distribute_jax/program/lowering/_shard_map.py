"""The usual lowering, ``jit(shard_map)``: what a hand-written data-parallel step compiles to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from distribute_jax._internals import with_packed_numbers
from distribute_jax._mesh import DATA, num_replicas
from distribute_jax.program.lowering._lower import Layouts
from distribute_jax.program.lowering._vmap import compile_vmap
from distribute_jax.program.tracing._trace import Call

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(DATA)


def maps_shards(mesh: Mesh) -> bool:
    """Tells whether a step is compiled through ``shard_map`` here.

    XLA's partitioner fails on a sum over a manual axis of size 1 beside automatic ones (JAX 0.10.2).
    """
    return num_replicas(mesh) > 1 or mesh.size == 1


def compile_shard_map(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    lies: Layouts,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles for the mesh; the result takes and gives flat global arrays."""
    mesh = call.mesh
    if not maps_shards(mesh):
        return compile_vmap(call, one_replica, lies, avals, donated)
    mapped = jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=tuple(_SPLIT if split else _WHOLE for split in lies.split),
        out_specs=[_WHOLE if mirrored else _SPLIT for mirrored in lies.mirrored],
        axis_names={DATA},
        check_vma=False,
    )
    jitted = jax.jit(
        mapped,
        in_shardings=lies.in_shardings(mesh),
        out_shardings=lies.out_shardings(mesh),
        donate_argnums=tuple(donated),
    )
    lowered = jitted.lower(*avals)
    compiled: Callable[..., list[jax.Array]] = with_packed_numbers(
        lowered.compile(_compiler_options(mesh)), avals
    )
    return compiled


def _compiler_options(mesh: Mesh) -> dict[str, bool | str] | None:
    """Leaves out a pass that ends the process, on CPU, in a bfloat16 sum beside automatic axes.

    It would add up in float32 (seen on JAX 0.10.2 and 0.12). Without it the CPU adds bfloat16 itself.
    """
    if mesh.size == num_replicas(mesh) or mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_disable_hlo_passes": "all-reduce-promotion"}
