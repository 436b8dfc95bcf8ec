"""Lowering of a sharded update: ``shard_map`` for what each replica does, XLA's partitioner for the rest.

In a training step the gradients are reduce-scattered, each replica updates its share of the weights with its
share of the optimizer's state, and the new weights are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distribute_jax._internals import with_packed_numbers
from distribute_jax._mesh import DATA, inside_replica, mirrored_sharding, num_replicas
from distribute_jax.program.lowering._cut import Cut
from distribute_jax.program.lowering._lower import Layouts
from distribute_jax.program.lowering._pieces import flat, has_talking_jit
from distribute_jax.program.lowering._shares import share_sharding, share_spec
from distribute_jax.program.proof._marks import MIRRORED
from distribute_jax.program.tracing._trace import Call

_OWN = frozenset({"an input of its own"})


def on_shares(
    mesh: Mesh, one_replica: Callable[..., list[Any]], lies: Layouts, avals: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Gives a step of all replicas, over global arrays, from the step of one.

    Args:
        mesh: where the replicas lie.
        one_replica: the step of one replica, over its flat inputs.
        lies: how the inputs and outputs lie; the state that is divided is what the replicas share.
        avals: the abstract global inputs.
    """
    body = _traced(mesh, one_replica, lies, avals)
    marks = [_OWN if split else MIRRORED for split in lies.split]
    cut = Cut(body, marks, lies.mirrored, num_replicas(mesh))
    first: Callable[..., Any] = jax.shard_map(
        lambda *taken: cut.first(taken),
        mesh=mesh,
        in_specs=tuple(share_spec(0 if lies.split[i] else None) for i in cut.reads),
        out_specs=[share_spec(one.dim) for one in cut.handed()],
        axis_names={DATA},
        check_vma=False,
    )

    settle = {
        i: functools.partial(_settled, mesh=mesh, kept=i in lies.sharded_out)
        for i in range(lies.state)
        if lies.mirrored[i]
    }

    def all_replicas(*inputs: Any) -> list[Any]:
        return cut.rest(inputs, first(*(inputs[i] for i in cut.reads)), settle)

    return all_replicas


def compile_whole(
    call: Call,
    all_replicas: Callable[..., list[Any]],
    lies: Layouts,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[Any]]:
    """Compiles a function of global arrays for the mesh."""
    jitted = jax.jit(
        all_replicas,
        in_shardings=lies.in_shardings(call.mesh),
        out_shardings=lies.out_shardings(call.mesh),
        donate_argnums=tuple(donated),
    )
    compiled: Callable[..., list[Any]] = with_packed_numbers(jitted.lower(*avals).compile(), avals)
    return compiled


def _traced(
    mesh: Mesh, one_replica: Callable[..., list[Any]], lies: Layouts, avals: Sequence[Any]
) -> Any:
    """Traces the step of one replica with all that the lowering added to it."""
    replicas = num_replicas(mesh)
    parts = [
        jax.ShapeDtypeStruct((a.shape[0] // replicas, *a.shape[1:]), a.dtype) if split else a
        for a, split in zip(avals, lies.split, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(inside_replica(mesh)):
        body = jax.make_jaxpr(one_replica, axis_env=[(DATA, replicas)])(*parts)
        while has_talking_jit(body):
            body = jax.make_jaxpr(flat(body), axis_env=[(DATA, replicas)])(*parts)
    return body


def _settled(new: jax.Array, computed: bool, *, mesh: Mesh, kept: bool) -> jax.Array:
    """Has each replica compute its share of new state, which is kept so, or gathered."""
    share = share_sharding(new, mesh)
    if share is None or not (computed or kept):
        return new
    settled: jax.Array = jax.lax.with_sharding_constraint(new, share)
    if not kept:
        settled = jax.lax.with_sharding_constraint(settled, mirrored_sharding(mesh))
    return settled
