"""The lowerings of a step by name: ``shard_map``, ``vmap`` and ``pmap``, and what each cannot do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from distribute_jax._errors import DistributeError, LoweringError
from distribute_jax._jax_private import with_packed_numbers
from distribute_jax._mesh import DATA, cores_per_replica, num_replicas, outside_mesh
from distribute_jax.program._jaxprs import ClosedJaxpr, line, name
from distribute_jax.program._layout import FlatStep
from distribute_jax.program._options import Lowering

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(DATA)

Compiled = Callable[..., list[Any]]
Compile = Callable[[FlatStep], Compiled]


def maps_shards(mesh: Mesh) -> bool:
    """Returns whether a step is compiled through ``shard_map`` here.

    XLA's partitioner fails on a sum over a manual axis of size 1 beside automatic ones (JAX 0.10.2).
    """
    return num_replicas(mesh) > 1 or mesh.size == 1


def compile_for_mesh(
    step: FlatStep, all_replicas: Compiled, options: dict[str, bool | str] | None = None
) -> Compiled:
    """Compiles a function of global arrays; XLA partitions what is not mapped over the mesh."""
    jitted = jax.jit(
        all_replicas,
        in_shardings=step.shardings.in_shardings(step.mesh),
        out_shardings=step.shardings.out_shardings(step.mesh),
        donate_argnums=tuple(step.donated),
    )
    compiled: Compiled = with_packed_numbers(jitted.lower(*step.avals).compile(options), step.avals)
    return compiled


def compile_shard_map(step: FlatStep) -> Compiled:
    """Compiles a step of one replica for the mesh; the result takes and gives flat global arrays."""
    if not maps_shards(step.mesh):
        return compile_vmap(step)
    mapped = jax.shard_map(
        step.function,
        mesh=step.mesh,
        in_specs=tuple(_SPLIT if split else _WHOLE for split in step.shardings.split),
        out_specs=[_WHOLE if same else _SPLIT for same in step.shardings.mirrored],
        axis_names={DATA},
        check_vma=False,
    )
    return compile_for_mesh(step, mapped, _compiler_options(step))


def _compiler_options(step: FlatStep) -> dict[str, bool | str] | None:
    """Leaves out, on CPU, what pays for many calls only, and a pass that ends the process.

    It does in a bfloat16 sum beside automatic axes, which it would add up in float32 (seen on JAX 0.10.2
    and 0.12). Without it the CPU adds bfloat16 itself.
    """
    mesh, options = step.mesh, dict[str, bool | str]()
    if mesh.devices.flat[0].platform == "cpu":
        if mesh.size > num_replicas(mesh):
            options["xla_disable_hlo_passes"] = "all-reduce-promotion"
        if step.runs_once:
            options["xla_backend_optimization_level"] = "0"
    return options or None


def compile_vmap(step: FlatStep) -> Compiled:
    """Compiles one program for the whole mesh, which XLA partitions by the shardings of its inputs."""
    replicas, shardings = num_replicas(step.mesh), step.shardings

    def one(*flat: jax.Array) -> list[jax.Array]:
        outs = step.function(*flat)
        return [
            _any_copy(x) if same else x for x, same in zip(outs, shardings.mirrored, strict=True)
        ]

    mapped = jax.vmap(
        one,
        in_axes=tuple(0 if split else None for split in shardings.split),
        out_axes=[None if same else 0 for same in shardings.mirrored],
        axis_name=DATA,
        axis_size=replicas,
        spmd_axis_name=DATA,
    )

    def all_replicas(*flat: jax.Array) -> list[jax.Array]:
        inputs = [
            _apart(x, replicas) if s else x for x, s in zip(flat, shardings.split, strict=True)
        ]
        outs = mapped(*inputs)
        return [
            x if same else x.reshape(-1, *x.shape[2:])
            for x, same in zip(outs, shardings.mirrored, strict=True)
        ]

    return compile_for_mesh(step, all_replicas)


def _apart(array: Any, replicas: int) -> jax.Array:
    """Returns the replicas' parts, one after the other along dim 0, as a new dim."""
    return jnp.reshape(array, (replicas, array.shape[0] // replicas, *array.shape[1:]))


@jax.custom_batching.custom_vmap
def _any_copy(array: jax.Array) -> jax.Array:
    """Returns ``vmap`` that all replicas have this value, which it cannot see of every mirrored one."""
    return array


@_any_copy.def_vmap
def _first(axis_size: int, batched: list[bool], array: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, batched  # it is called for batched values only
    return array[0], False


def compile_pmap(step: FlatStep) -> Compiled:
    """Compiles through ``jax.pmap``, which splits a leading dim; nothing is donated."""
    mesh, shardings = step.mesh, step.shardings
    if (cores := cores_per_replica(mesh)) > 1:
        raise LoweringError(
            f'RunOptions(lowering="pmap") cannot run a step on replicas of {cores} cores: pmap knows one '
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


Stack = tuple[Any, ...]
"""An equation, after the equations that hold it."""

_LINE = re.compile(r":\d+$")

_REFUSED = """\
RunOptions(lowering="vmap") cannot run {what}: {reason}
This lowering runs the step as a vmap over the replicas. Use RunOptions(lowering="shard_map"), the \
default, which runs every operation."""

_KEYS = "under vmap, keys of this kind ({}) draw other numbers than on each replica by itself"
_ONCE = "under vmap it may run once for all replicas, rather than once on each"


@contextmanager
def refusing_unbatchable(jaxpr: ClosedJaxpr, replicas: int) -> Iterator[None]:
    """Refuses a jaxpr that gives other numbers under ``vmap``, or one that JAX fails to compile so."""
    for stack in equations(jaxpr.jaxpr):
        if reason := other_numbers(stack[-1]):
            raise _refusal(stack, reason)
    try:
        yield
    except (DistributeError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise _refusal(_culprit(jaxpr.jaxpr, replicas), str(error).partition("\n")[0]) from error


def _refusal(stack: Stack, reason: str) -> LoweringError:
    # What JAX's own functions are made of has no line of the user's, but the call around it has.
    lines = [found for eqn in reversed(stack) if _LINE.search(found := line(eqn))]
    what = " at ".join([name(stack[-1]), *lines[:1]]) if stack else "this step"
    return LoweringError(_REFUSED.format(what=what, reason=reason.rstrip(".!") + "."))


def equations(jaxpr: jex_core.Jaxpr, around: Stack = ()) -> Iterator[Stack]:
    """Returns every equation, after those it holds, as the last of the equations that hold it."""
    for eqn in jaxpr.eqns:
        stack = (*around, eqn)
        for inner in jex_core.subjaxprs(jaxpr.replace(eqns=[eqn])):
            yield from equations(inner, stack)
        yield stack


def other_numbers(eqn: Any) -> str | None:
    """Returns why an equation by itself gives other numbers than on each replica; None if it does not."""
    primitive = eqn.primitive.name
    if primitive in {"rng_bit_generator", "rng_uniform"}:
        return _KEYS.format(primitive)
    if primitive == "random_bits" and "rbg" in str(eqn.invars[0].aval.dtype):
        return _KEYS.format(eqn.invars[0].aval.dtype)
    return _ONCE if primitive == "io_callback" else None


def _culprit(jaxpr: jex_core.Jaxpr, replicas: int) -> Stack:
    """Finds the first equation that does not work under ``vmap`` by itself."""
    stacks = equations(jaxpr)
    return next((stack for stack in stacks if not _works_alone(jaxpr, stack[-1], replicas)), ())


def _works_alone(jaxpr: jex_core.Jaxpr, eqn: Any, replicas: int) -> bool:
    reads = dict.fromkeys(v for v in eqn.invars if not isinstance(v, jex_core.Literal))
    if not all(isinstance(v.aval, jax.core.ShapedArray) for v in (*reads, *eqn.outvars)):
        return True  # a ref cannot leave the program that made it
    alone = jaxpr.replace(constvars=[], invars=list(reads), outvars=eqn.outvars, eqns=[eqn])
    step = jax.vmap(
        jex_core.jaxpr_as_fun(ClosedJaxpr(alone, ())),
        axis_name=DATA,
        axis_size=replicas,
        spmd_axis_name=DATA,
    )
    inputs = [jax.ShapeDtypeStruct((replicas, *v.aval.shape), v.aval.dtype) for v in reads]
    try:
        jax.eval_shape(step, *inputs)
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class Compiler:
    """One way to compile a traced step for all replicas."""

    compile: Compile
    """Makes a program over flat global arrays."""
    is_jit: bool = True
    """Whether it can take over the memory of inputs, scan several steps, and share state."""
    keeps_sharding: bool = False
    """Whether state that is sharded over the replicas stays so."""


COMPILERS: dict[Lowering, Compiler] = {
    "shard_map": Compiler(compile_shard_map),
    "vmap": Compiler(compile_vmap, keeps_sharding=True),
    "pmap": Compiler(compile_pmap, is_jit=False),
}


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
