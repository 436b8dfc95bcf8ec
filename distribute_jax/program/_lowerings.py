"""The lowerings of a step by name: ``shard_map``, ``vmap`` and ``pmap``, and what each cannot do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from distribute_jax.program._layout import Evaluate, StepShardings, by_equation, in_one_equation
from distribute_jax.program._options import Lowering
from distribute_jax.program._replication_rules import ClosedJaxpr, line, name
from distribute_jax.program._trace import Call

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(DATA)


def maps_shards(mesh: Mesh) -> bool:
    """Returns whether a step is compiled through ``shard_map`` here.

    XLA's partitioner fails on a sum over a manual axis of size 1 beside automatic ones (JAX 0.10.2).
    """
    return num_replicas(mesh) > 1 or mesh.size == 1


def compile_shard_map(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    shardings: StepShardings,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles for the mesh; the result takes and gives flat global arrays."""
    mesh = call.mesh
    if not maps_shards(mesh):
        return compile_vmap(call, one_replica, shardings, avals, donated)
    mapped = jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=tuple(_SPLIT if split else _WHOLE for split in shardings.split),
        out_specs=[_WHOLE if mirrored else _SPLIT for mirrored in shardings.mirrored],
        axis_names={DATA},
        check_vma=False,
    )
    jitted = jax.jit(
        mapped,
        in_shardings=shardings.in_shardings(mesh),
        out_shardings=shardings.out_shardings(mesh),
        donate_argnums=tuple(donated),
    )
    lowered = jitted.lower(*avals)
    compiled: Callable[..., list[jax.Array]] = with_packed_numbers(
        lowered.compile(_compiler_options(call)), avals
    )
    return compiled


def _compiler_options(call: Call) -> dict[str, bool | str] | None:
    """Leaves out, on CPU, what pays for many calls only, and a pass that ends the process.

    It does in a bfloat16 sum beside automatic axes, which it would add up in float32 (seen on JAX 0.10.2
    and 0.12). Without it the CPU adds bfloat16 itself.
    """
    mesh, options = call.mesh, dict[str, bool | str]()
    if mesh.devices.flat[0].platform == "cpu":
        if mesh.size > num_replicas(mesh):
            options["xla_disable_hlo_passes"] = "all-reduce-promotion"
        if call.runs_once:
            options["xla_backend_optimization_level"] = "0"
    return options or None


def compile_vmap(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    shardings: StepShardings,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles one program for the whole mesh, which XLA partitions by the shardings of its inputs."""
    mesh = call.mesh
    replicas = num_replicas(mesh)

    def one(*flat: jax.Array) -> list[jax.Array]:
        outs = one_replica(*flat)
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
        return [x if same else _joined(x) for x, same in zip(outs, shardings.mirrored, strict=True)]

    jitted = jax.jit(
        all_replicas,
        in_shardings=shardings.in_shardings(mesh),
        out_shardings=shardings.out_shardings(mesh),
        donate_argnums=tuple(donated),
    )
    compiled: Callable[..., list[jax.Array]] = with_packed_numbers(
        jitted.lower(*avals).compile(), avals
    )
    return compiled


def _apart(array: jax.Array, replicas: int) -> jax.Array:
    """Returns the replicas' parts, one after the other along dim 0, as a new dim."""
    return array.reshape(replicas, array.shape[0] // replicas, *array.shape[1:])


def _joined(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


@jax.custom_batching.custom_vmap
def _any_copy(array: jax.Array) -> jax.Array:
    """Returns ``vmap`` that all replicas have this value, which it cannot see of every mirrored one."""
    return array


@_any_copy.def_vmap
def _first(axis_size: int, batched: list[bool], array: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, batched  # it is called for batched values only
    return array[0], False


def compile_pmap(
    call: Call,
    one_replica: Callable[..., list[jax.Array]],
    shardings: StepShardings,
    avals: Sequence[Any],
    donated: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Compiles through ``jax.pmap``, which splits a leading dim; nothing is donated."""
    del avals, donated
    mesh = call.mesh
    if (cores := cores_per_replica(mesh)) > 1:
        raise LoweringError(
            f'RunOptions(lowering="pmap") cannot run a step on replicas of {cores} cores: pmap knows one '
            'device for each replica. Use RunOptions(lowering="shard_map"), the default.'
        )

    def unstacked(number: jax.Array, *flat: jax.Array) -> list[jax.Array]:
        del number  # pmap refuses a function of which no argument is split
        again = [
            x[None] if stacked else x for x, stacked in zip(flat, shardings.stacked, strict=True)
        ]
        outs = one_replica(*again)
        return [x if whole else x[0] for x, whole in zip(outs, shardings.mirrored, strict=True)]

    mapped = jax.pmap(
        unstacked,
        axis_name=DATA,
        in_axes=(0, *(0 if split else None for split in shardings.split)),
        out_axes=[None if whole else 0 for whole in shardings.mirrored],
        devices=list(mesh.devices.flat),
    )
    wanted = shardings.out_shardings(mesh)

    def compiled(*flat: Any) -> list[jax.Array]:
        with outside_mesh():
            inputs = [
                _with_replica_dim(x, mesh.shape[DATA]) if s and not stacked else x
                for x, s, stacked in zip(flat, shardings.split, shardings.stacked, strict=True)
            ]
            outs = mapped(np.arange(mesh.shape[DATA]), *inputs)
            return [jax.device_put(x, to) for x, to in zip(outs, wanted, strict=True)]

    return compiled


def _with_replica_dim(array: Any, replicas: int) -> jax.Array:
    return jnp.reshape(array, (replicas, array.shape[0] // replicas, *array.shape[1:]))


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


Compiled = Callable[..., list[Any]]
Compile = Callable[[Call, Compiled, StepShardings, Sequence[Any], Sequence[int]], Compiled]
"""Takes the call, the function of one replica, the layouts and abstract values of its inputs, and
which of these are donated."""


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
    """Whether inputs can be donated to it."""
    scans: bool = True
    """Whether several steps can be one program."""
    keeps_sharding: bool = False
    """Whether state that is sharded over the replicas stays so."""
    shares: bool = True
    """Whether the replicas can share the state of optimizers."""
    refusing: Callable[[Any, int], AbstractContextManager[None]] = _anything
    """Returns a context for compiling a jaxpr for N replicas, which refuses what does not work."""
    evaluate: Callable[[Mesh], Evaluate] = _by_equation
    """How it evaluates the equations of the step."""


COMPILERS: dict[Lowering, Compiler] = {
    "shard_map": Compiler(compile_shard_map, evaluate=_whole_in_shards),
    "vmap": Compiler(compile_vmap, keeps_sharding=True, refusing=refusing_unbatchable),
    "pmap": Compiler(compile_pmap, donates=False, scans=False, shares=False),
}


def only_state(shardings: StepShardings) -> bool:
    """Returns whether every output of a step is state."""
    return len(shardings.mirrored) == shardings.state


def with_token(compile_step: Compile) -> Compile:
    """Returns a lowering whose programs have one more output, the last, where all others are state.

    All outputs of a program are there at once, so a number that costs nothing tells when the state is,
    also when a later step has taken that. Without it the loop would wait for the newest step.
    """

    def compile_with_token(
        call: Call,
        step: Compiled,
        shardings: StepShardings,
        avals: Sequence[Any],
        donated: Sequence[int],
    ) -> Compiled:
        if not only_state(shardings):
            return compile_step(call, step, shardings, avals, donated)
        more = replace(shardings, mirrored=(*shardings.mirrored, True))
        return compile_step(call, _and_token(step), more, avals, donated)

    return compile_with_token


def _and_token(step: Compiled) -> Callable[..., list[Any]]:
    def and_token(*flat: Any) -> list[Any]:
        return [*step(*flat), jnp.ones((), jnp.uint32)]

    and_token.__name__ = and_token.__qualname__ = getattr(step, "__name__", "step")
    return and_token
