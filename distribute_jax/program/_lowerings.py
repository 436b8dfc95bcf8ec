"""Lowers a traced step: a flat function of one replica and its shardings, in ``shard_map`` or ``pmap``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distribute_jax._errors import DeadlockError, LoweringError
from distribute_jax._jax_private import is_high, without_layout_check
from distribute_jax._mesh import (
    DATA,
    cores_per_replica,
    in_device_memory,
    inside_replica,
    manual_axes,
    mirrored_sharding,
    num_replicas,
    outside_mesh,
    replicas_per_device,
    split_sharding,
)
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import FROM_OLD, Combine, combined, keeps_own_values
from distribute_jax.program._hlo import has_exchange_in_branch
from distribute_jax.program._jaxprs import ClosedJaxpr, has_effects, without_axis
from distribute_jax.program._options import Lowering
from distribute_jax.program._plan import Plan, model_shaped
from distribute_jax.program._skipped_steps import (
    StepCounts,
    chosen_by_cond,
    counts_at_start,
    keep_old_if_unsound,
)
from distribute_jax.program._trace import Call, Traced, abstract, global_value, state_outputs

Evaluate = Callable[[ClosedJaxpr], Callable[..., list[Any]]]
"""Returns a jaxpr as a function."""


@dataclass(frozen=True, eq=False)
class StepShardings:
    """The sharding of each flat input and output over the mesh."""

    stacked: tuple[bool, ...]
    """For each input: whether it has a leading dim for the replicas, of size 1 inside one."""
    split: tuple[bool, ...]
    """For each input: whether it is divided along dim 0."""
    mirrored: tuple[bool, ...]
    """For each output: whether every replica has the same value."""
    state: int
    """How many of the first outputs are state."""
    sharded_in: Mapping[int, NamedSharding] = field(default_factory=dict)
    """The inputs, by position, that are stored sharded although each replica sees the whole array."""
    sharded_out: Mapping[int, NamedSharding] = field(default_factory=dict)
    """The outputs, by position, that are stored sharded."""

    def in_shardings(self, mesh: Mesh) -> tuple[NamedSharding, ...]:
        """Returns the sharding of each input between steps."""
        usual = {True: split_sharding(mesh), False: mirrored_sharding(mesh)}
        return tuple(self.sharded_in.get(i, usual[split]) for i, split in enumerate(self.split))

    def out_shardings(self, mesh: Mesh) -> list[NamedSharding]:
        usual = {True: mirrored_sharding(mesh), False: split_sharding(mesh)}
        return [self.sharded_out.get(i, usual[same]) for i, same in enumerate(self.mirrored)]

    def in_order(self, order: Sequence[int]) -> StepShardings:
        """Returns the shardings of a program that takes only these inputs, in this order."""
        at = {i: position for position, i in enumerate(order)}
        return replace(
            self,
            stacked=tuple(self.stacked[i] for i in order),
            split=tuple(self.split[i] for i in order),
            sharded_in={at[i]: sharding for i, sharding in self.sharded_in.items() if i in at},
        )


def _step_shardings(
    call: Call, traced: Traced, plan: Plan, kept: Sequence[NamedSharding | None]
) -> StepShardings:
    components = [
        keeps_own_values(variable)
        for variable in call.binding.variables
        for _ in jax.tree.leaves(variable.get_raw_value())
    ]
    batch = [isinstance(value, PerReplica) for value in call.arguments.data]
    stacked = [
        b and v.layout is Layout.STACKED for b, v in zip(batch, call.arguments.data, strict=True)
    ]
    arrays, counts = [False] * traced.sizes.arrays, [False] * traced.sizes.counts
    sharded = {i: s for i, s in enumerate(kept) if s is not None}
    ins, outs = traced.jaxpr.jaxpr.invars, traced.jaxpr.jaxpr.outvars
    return StepShardings(
        stacked=(*components, *arrays, *stacked, *counts),
        split=(*components, *arrays, *batch, *counts),
        mirrored=(*(rule is not Combine.OWN for rule in plan.combine), *plan.mirrored),
        state=len(plan.combine),
        sharded_in=sharded,
        sharded_out={
            out: sharded[old]
            for out, old in (*enumerate(traced.old_inputs), *returned_arguments(call, traced))
            if old in sharded and ins[old].aval.shape == outs[out].aval.shape
        },
    )


def returned_arguments(call: Call, traced: Traced) -> Iterator[tuple[int, int]]:
    """Yields pairs of an output that is the new value of an argument, and its input."""
    results, data = len(traced.old_inputs), traced.sizes.first_data
    kinds, variables = call.arguments.kinds, map(id, call.binding.variables)
    starts = dict(zip(variables, itertools.pairwise(traced.input_starts), strict=True))
    for part in model_shaped(call, traced):
        for k, leaf in zip(part.results, part.leaves, strict=True):
            if kinds[leaf.position] == "data":
                yield results + k, data + kinds[: leaf.position].count("data")
                continue
            # A variable, as in an nnx.State.
            start, end = starts.get(id(call.arguments.leaves[leaf.position]), (0, 0))
            if end - start == 1:
                yield results + k, start


class AheadOfTime:
    """Compiles for an abstract mesh of any size, with one local device in place of each of its devices."""

    def __init__(self, device: jax.Device) -> None:
        self.device = device
        self.compiled: Any = None
        self.times = [time.perf_counter()]
        """When tracing began, and when it was traced, lowered and compiled."""

    def compile(self, traced: Any, devices: int, options: dict[str, bool | str] | None) -> Any:
        """Lowers and compiles a traced ``jax.jit``."""
        platform = self.device.platform
        if platform == "gpu":  # which is cuda or rocm
            platform = export.default_export_platform()
        self.times.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=(platform,))
        self.times.append(time.perf_counter())
        self.compiled = lowered.compile(options, device_assignment=(self.device,) * devices)
        self.times.append(time.perf_counter())
        return self.compiled


@dataclass(frozen=True, eq=False)
class FlatStep:
    """A step as a function of flat arrays, and how to compile it."""

    function: Callable[..., list[Any]]
    """The step of one replica on its arrays; if state is sharded, of all replicas on global arrays."""
    mesh: Mesh
    shardings: StepShardings
    avals: Sequence[Any]
    """The abstract values of the global inputs."""
    donated: Sequence[int] = ()
    """The inputs whose memory the outputs may reuse."""
    runs_once: bool = False
    """Whether compiling takes longer than running."""
    ahead: AheadOfTime | None = None
    """Compiles it if the mesh is abstract."""
    diverging: tuple[str, ...] = ()
    """Predicates and trip counts that may differ between replicas."""
    reshard_after_forward: bool | None = None
    """Whether divided inputs are gathered again for the backward pass; None for only in scans and remat."""

    @property
    def platform(self) -> str:
        return str((self.ahead.device if self.ahead else self.mesh.devices.flat[0]).platform)


def flat_step(
    call: Call,
    traced: Traced,
    plan: Plan,
    order: Sequence[int],
    arrays: Sequence[Any],
    evaluate: Evaluate,
    kept: Sequence[NamedSharding | None] = (),
) -> FlatStep:
    """Returns the step of one replica as a function of the flat inputs in ``order``.

    It keeps neither variables nor captured arrays alive. ``kept`` is the sharding in which each flat input is
    stored, if it is sharded over the replicas.
    """
    shardings = _step_shardings(call, traced, plan, kept)
    avals = _input_avals(call, arrays)
    state, old = len(plan.combine), traced.old_inputs
    kinds = [type(variable) for variable, *_ in state_outputs(call, traced)]
    decided = [
        done and rule is Combine.MIRRORED
        for done, rule in zip(chosen_by_cond(traced.jaxpr.jaxpr, old), plan.combine, strict=True)
    ]
    position = {i: at for at, i in enumerate(order)}
    # Captured arrays that cannot be replaced in place are constants of the trace: read them as inputs.
    array_at = {id(array): traced.sizes.state + i for i, array in enumerate(arrays)}

    def step(*flat: jax.Array) -> list[jax.Array]:
        # Inputs that the program does not read only need a value of the right type.
        every = [
            flat[position[i]] if i in position else jnp.zeros(aval.shape, aval.dtype)
            for i, aval in enumerate(avals)
        ]
        inputs = [x[0] if s else x for x, s in zip(every, shardings.stacked, strict=True)]
        for i, kind in zip(old, kinds, strict=True):
            if issubclass(kind, StepCounts):
                inputs[i] = counts_at_start(inputs[i])
        consts = [inputs[array_at[id(c)]] if id(c) in array_at else c for c in traced.jaxpr.consts]
        outs = evaluate(ClosedJaxpr(traced.jaxpr.jaxpr, consts))(*inputs)
        new = [
            combined(rule, out, inputs[old[i]] if rule in FROM_OLD else out)
            for i, (rule, out) in enumerate(zip(plan.combine, outs[:state], strict=True))
        ]
        for merge in plan.merges:
            before = [inputs[old[k]] for k in merge.outputs]
            merged = merge.combined([outs[k] for k in merge.outputs], before)
            for k, value in zip(merge.outputs, merged, strict=True):
                new[k] = value
        return keep_old_if_unsound(new, [inputs[i] for i in old], kinds, decided) + [
            out if mirrored else out[None]
            for out, mirrored in zip(outs[state:], plan.mirrored, strict=True)
        ]

    ordered = [avals[i] for i in order]
    return FlatStep(
        step, call.mesh, shardings.in_order(order), ordered,
        runs_once=call.runs_once, diverging=plan.diverging,
    )  # fmt: skip


def _input_avals(call: Call, arrays: Sequence[Any]) -> list[Any]:
    values: list[Any] = [global_value(v, call.mesh) for v in call.binding.variables]
    values += arrays
    values += call.arguments.arrays
    avals: list[Any] = jax.tree.leaves([abstract(value) for value in values])
    if call.arguments.counts is not None:
        avals.append(jax.ShapeDtypeStruct((num_replicas(call.mesh),), jnp.int32))
    return avals


_NAME = "replica_step"

step_p: Any = jex_core.Primitive(_NAME)
"""All equations of a step, lowered as one function."""
step_p.multiple_results = True


def by_equation(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a traced step as a function that is traced equation by equation."""
    function: Callable[..., list[Any]] = jex_core.jaxpr_as_fun(jaxpr)
    return function


def in_one_equation(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a traced step as a function that ``shard_map`` and ``scan`` trace to one equation.

    It is traced equation by equation if it prints, calls back or holds refs, since JAX looks for these in
    the outermost program; if its constants are tracers; or if JAX has yet to lower it to basic operations.
    """
    traced_constants = any(isinstance(c, jax.core.Tracer) for c in jaxpr.consts)
    if has_effects(jaxpr) or is_high(jaxpr) or traced_constants:
        return by_equation(jaxpr)
    return lambda *inputs: step_p.bind(*inputs, call_jaxpr=jaxpr)


step_p.def_abstract_eval(lambda *_, call_jaxpr: call_jaxpr.out_avals)
mlir.register_lowering(step_p, partial(mlir.core_call_lowering, name=_NAME))


_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(DATA)

Compiled = Callable[..., list[Any]]
Compile = Callable[[FlatStep], Compiled]


def compile_for_mesh(step: FlatStep) -> Compiled:
    """Compiles a step that is a function of global arrays; XLA partitions all outside of a ``shard_map``."""
    options = _compiler_options(step)
    in_shardings = step.shardings.in_shardings(step.mesh)
    out_shardings = step.shardings.out_shardings(step.mesh)
    jitted = jax.jit(
        _with_moves(step.function, in_shardings, out_shardings),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=tuple(step.donated),
    )
    with outside_mesh():  # the mesh of an open scope may differ from the one that divides state
        traced = jitted.trace(*step.avals)
        if step.ahead is None:
            compiled: Any = traced.lower().compile(options)
        else:
            compiled = step.ahead.compile(traced, step.mesh.size, options)
    _check_exchanges(step, compiled)
    packed: Compiled = without_layout_check(compiled, step.avals)
    return packed


def _with_moves(
    function: Compiled, ins: Sequence[NamedSharding], outs: Sequence[NamedSharding]
) -> Compiled:
    """Returns a function that moves inputs to device memory, and outputs to the memory they are stored in."""
    ins_there, outs_there = (list(map(in_device_memory, of)) for of in (ins, outs))
    if ins_there == list(ins) and outs_there == list(outs):
        return function

    def moved(value: Any, at: NamedSharding, to: NamedSharding) -> Any:
        return value if at == to else jax.device_put(value, to)

    def step(*flat: Any) -> list[Any]:
        return list(map(moved, function(*map(moved, flat, ins, ins_there)), outs_there, outs))

    return step


_EXCHANGE = """\
The step may hang: not every replica is sure to reach a place where the devices of a replica exchange parts \
of a value.
  decided by: {what}
  which may differ between replicas
To roll, join, slice or pad a value along a dim that is divided over the devices of a replica, XLA lets all \
devices of all replicas exchange parts; if one does not take part, the others wait forever.
Replicate the value over its devices before the branch or loop:
    x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())
or reduce the predicate first, so that all replicas decide the same:
    dj.get_replica_context().all_reduce('sum', jnp.int32(pred)) > 0"""


def _check_exchanges(step: FlatStep, compiled: Any) -> None:
    """Raises DeadlockError if XLA exchanges parts of values in a branch that replicas may not all take."""
    has_automatic_axes = manual_axes(step.mesh) != set(step.mesh.axis_names)
    if step.diverging and has_automatic_axes and has_exchange_in_branch(compiled.as_text()):
        raise DeadlockError(_EXCHANGE.format(what="\n    ".join(step.diverging)))


def compile_shard_map(step: FlatStep) -> Compiled:
    """Compiles a step of one replica for the mesh, as a function of flat global arrays."""
    if step.mesh.shape[DATA] == 1:
        return compile_for_mesh(replace(step, function=_one_replica(step)))
    mapped = jax.shard_map(
        step.function,
        mesh=step.mesh,
        in_specs=tuple(_SPLIT if split else _WHOLE for split in step.shardings.split),
        out_specs=[_WHOLE if same else _SPLIT for same in step.shardings.mirrored],
        axis_names=manual_axes(step.mesh),
        check_vma=False,
    )
    return compile_for_mesh(replace(step, function=mapped))


def _compiler_options(step: FlatStep) -> dict[str, bool | str] | None:
    """Returns XLA options for CPU: no optimization of a program that runs once, and one pass less.

    The pass ``all-reduce-promotion`` aborts the process at a bfloat16 sum beside automatic axes (JAX 0.10.2
    and 0.12). Without it the CPU adds in bfloat16.
    """
    mesh, options = step.mesh, dict[str, bool | str]()
    if step.platform == "cpu":
        if manual_axes(mesh) != set(mesh.axis_names):
            options["xla_disable_hlo_passes"] = "all-reduce-promotion"
        if step.runs_once:
            options["xla_backend_optimization_level"] = "0"
    return options or None


def _one_replica(replica: FlatStep) -> Compiled:
    """Returns the step of the only replica, without collectives.

    They would cost a copy of their operands (CPU), and XLA's partitioner fails on a sum over a manual axis of
    size 1 beside automatic ones (JAX 0.10.2).
    """
    with jax.sharding.use_abstract_mesh(inside_replica(replica.mesh)):
        body = jax.make_jaxpr(replica.function, axis_env=[(DATA, 1)])(*replica.avals)
    function = jex_core.jaxpr_as_fun(without_axis(body))

    def step(*flat: Any) -> list[Any]:
        outs: list[Any] = function(*flat)
        return outs

    return step


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
            replicas = mesh.shape[DATA]
            inputs = [
                jnp.reshape(x, (replicas, x.shape[0] // replicas, *x.shape[1:]))
                if split and not stacked
                else x
                for x, split, stacked in zip(flat, shardings.split, shardings.stacked, strict=True)
            ]
            outs = mapped(np.arange(replicas), *inputs)
            return [jax.device_put(x, to) for x, to in zip(outs, wanted, strict=True)]

    return compiled


COMPILERS: dict[Lowering, Compile] = {"shard_map": compile_shard_map, "pmap": compile_pmap}


def with_token(step: FlatStep) -> FlatStep:
    """Returns a step with one more output, a scalar, for a step whose outputs are all state.

    The outputs of a program are ready at once, so waiting for the scalar shows that a step has finished, even
    after a later step was given the state. Without it the loop would have to wait for the newest step.
    """

    def and_token(*flat: Any) -> list[Any]:
        return [*step.function(*flat), jnp.ones((), jnp.uint32)]

    and_token.__name__ = "step"
    shardings = replace(step.shardings, mirrored=(*step.shardings.mirrored, True))
    return replace(step, function=and_token, shardings=shardings)
