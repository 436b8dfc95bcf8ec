"""The lowerings by name, and what each of them can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from distribute_jax.program._options import Lowering
from distribute_jax.program.lowering._batchable import refusing_unbatchable
from distribute_jax.program.lowering._lower import Evaluate, Layouts
from distribute_jax.program.lowering._pmap import compile_pmap
from distribute_jax.program.lowering._shard_map import compile_shard_map, maps_shards
from distribute_jax.program.lowering._vmap import compile_vmap
from distribute_jax.program.lowering._whole import by_equation, in_one_equation
from distribute_jax.program.proof._marks import ClosedJaxpr
from distribute_jax.program.tracing._trace import Call

Compiled = Callable[..., list[Any]]
Compile = Callable[[Call, Compiled, Layouts, Sequence[Any], Sequence[int]], Compiled]
"""Takes the call, the function of one replica, the layouts and abstract values of its inputs, and
which of these are given away."""


def _anything(jaxpr: ClosedJaxpr, replicas: int) -> AbstractContextManager[None]:
    del jaxpr, replicas
    return nullcontext()


def _by_equation(mesh: Mesh) -> Evaluate:
    del mesh
    return by_equation


def _whole_in_shards(mesh: Mesh) -> Evaluate:
    return in_one_equation if maps_shards(mesh) else by_equation


@dataclass(frozen=True)
class Compiler:
    """One way to compile a traced step for all replicas."""

    compile: Compile
    """Makes a program over flat global arrays."""
    donates: bool = True
    """Whether inputs can be given away to it."""
    scans: bool = True
    """Whether several steps can be one program."""
    keeps_sharding: bool = False
    """Whether state that lies sharded over the replicas stays so."""
    shares: bool = True
    """Whether the replicas can share the state of optimizers."""
    refusing: Callable[[Any, int], AbstractContextManager[None]] = _anything
    """Gives a context for compiling a jaxpr for N replicas, which refuses what does not work."""
    evaluate: Callable[[Mesh], Evaluate] = _by_equation
    """Says how it goes through the equations of the step."""


COMPILERS: dict[Lowering, Compiler] = {
    "shard_map": Compiler(compile_shard_map, evaluate=_whole_in_shards),
    "vmap": Compiler(compile_vmap, keeps_sharding=True, refusing=refusing_unbatchable),
    "pmap": Compiler(compile_pmap, donates=False, scans=False, shares=False),
}
