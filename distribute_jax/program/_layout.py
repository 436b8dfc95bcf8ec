"""The traced step as a function of one replica, and how its arrays are sharded over the mesh."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import export
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding

from distribute_jax._jax_private import is_high
from distribute_jax._mesh import mirrored_sharding, num_replicas, split_sharding
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import FROM_OLD, Combine, combined, keeps_own_values
from distribute_jax.program._jaxprs import ClosedJaxpr
from distribute_jax.program._plan import Plan, model_shaped
from distribute_jax.program._trace import Call, Traced, abstract, global_value, state_outputs
from distribute_jax.program._undo import StepCounts, begun, undone, updated_if_sound

Evaluate = Callable[[ClosedJaxpr], Callable[..., list[Any]]]
"""Returns the function that a jaxpr is."""


@dataclass(frozen=True, eq=False)
class StepShardings:
    """The sharding of each flat input and output over the mesh."""

    stacked: tuple[bool, ...]
    """For each input: it has a leading dim for the replicas, of size 1 inside one."""
    split: tuple[bool, ...]
    """For each input: it is divided along dim 0."""
    mirrored: tuple[bool, ...]
    """For each output: every replica has the same value."""
    state: int
    """How many of the first outputs are state."""
    sharded_in: Mapping[int, NamedSharding] = field(default_factory=dict)
    """The inputs, by position, that are sharded over the replicas although each replica sees all."""
    sharded_out: Mapping[int, NamedSharding] = field(default_factory=dict)
    """The outputs, by position, that are left so."""

    def in_shardings(self, mesh: Mesh) -> tuple[NamedSharding, ...]:
        """Returns the sharding of each input between steps."""
        usual = {True: split_sharding(mesh), False: mirrored_sharding(mesh)}
        return tuple(self.sharded_in.get(i, usual[split]) for i, split in enumerate(self.split))

    def out_shardings(self, mesh: Mesh) -> list[NamedSharding]:
        """Returns the sharding of each output."""
        usual = {True: mirrored_sharding(mesh), False: split_sharding(mesh)}
        return [self.sharded_out.get(i, usual[same]) for i, same in enumerate(self.mirrored)]

    def in_order(self, order: Sequence[int]) -> StepShardings:
        """Returns the layouts of a program that takes only these inputs, in this order."""
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
    """Returns the shardings of inputs and outputs over the mesh."""
    _, arrays, _, counts = traced.sizes
    components = [
        keeps_own_values(variable)
        for variable in call.binding.variables
        for _ in jax.tree.leaves(variable.get_raw_value())
    ]
    batch = [isinstance(value, PerReplica) for value in call.arguments.data]
    stacked = [
        b and v.layout is Layout.STACKED for b, v in zip(batch, call.arguments.data, strict=True)
    ]
    unsplit, unsplit_counts = [False] * arrays, [False] * counts
    sharded = {i: s for i, s in enumerate(kept) if s is not None}
    ins, outs = traced.jaxpr.jaxpr.invars, traced.jaxpr.jaxpr.outvars
    return StepShardings(
        stacked=(*components, *unsplit, *stacked, *unsplit_counts),
        split=(*components, *unsplit, *batch, *unsplit_counts),
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
    """Returns the outputs that are the new value of an argument, each with that input."""
    results, data = sum(traced.written_sizes), sum(traced.sizes[:2])
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
    """Compiles for the devices of an abstract mesh, as many as there are, on one that is here."""

    def __init__(self, device: jax.Device) -> None:
        self.device = device
        self.compiled: Any = None
        self.times = [time.perf_counter()]
        """When it began, was traced, lowered and compiled."""

    def compile(self, traced: Any, devices: int, options: dict[str, bool | str] | None) -> Any:
        """Lowers and compiles what ``jax.jit`` has traced."""
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
    """A step as a function of flat arrays, and what to compile it for."""

    function: Callable[..., list[Any]]
    """The step of one replica; where the replicas share state, that of all, over global arrays."""
    mesh: Mesh
    shardings: StepShardings
    avals: Sequence[Any]
    """The abstract values of the global inputs."""
    donated: Sequence[int] = ()
    """The inputs whose memory the outputs may take."""
    runs_once: bool = False
    """Whether compiling takes longer than running."""
    ahead: AheadOfTime | None = None
    """What compiles it if the mesh is abstract."""
    gathers_once: bool = False
    """Whether an input that the replicas divide is gathered once, and not again for the backward pass."""

    @property
    def platform(self) -> str:
        """The kind of devices to compile for."""
        device = self.ahead.device if self.ahead else self.mesh.devices.flat[0]
        return str(device.platform)


def flat_step(
    call: Call,
    traced: Traced,
    plan: Plan,
    order: Sequence[int],
    arrays: Sequence[Any],
    evaluate: Evaluate,
    kept: Sequence[NamedSharding | None] = (),
) -> FlatStep:
    """Returns the step of one replica as a function of those flat inputs that it uses, in this order.

    It keeps neither variables nor captured arrays alive. ``kept`` is the sharding over the replicas that
    each flat input keeps, of those that are state.
    """
    shardings = _step_shardings(call, traced, plan, kept)
    avals = _input_avals(call, arrays)
    state, old = len(plan.combine), traced.old_inputs
    kinds = [type(variable) for variable, *_ in state_outputs(call, traced)]
    decided = [
        done and rule is Combine.MIRRORED
        for done, rule in zip(updated_if_sound(traced.jaxpr.jaxpr, old), plan.combine, strict=True)
    ]
    position = {i: at for at, i in enumerate(order)}
    # Arrays captured where nothing can be assigned are constants of the trace: read them as inputs.
    array_at = {id(array): traced.sizes[0] + i for i, array in enumerate(arrays)}

    def step(*flat: jax.Array) -> list[jax.Array]:
        # What the program does not read needs a value of the right type only.
        every = [
            flat[position[i]] if i in position else jnp.zeros(aval.shape, aval.dtype)
            for i, aval in enumerate(avals)
        ]
        inputs = [x[0] if s else x for x, s in zip(every, shardings.stacked, strict=True)]
        for i, kind in zip(old, kinds, strict=True):
            if issubclass(kind, StepCounts):
                inputs[i] = begun(inputs[i])
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
        return undone(new, [inputs[i] for i in old], kinds, decided) + [
            out if mirrored else out[None]
            for out, mirrored in zip(outs[state:], plan.mirrored, strict=True)
        ]

    ordered = [avals[i] for i in order]
    return FlatStep(step, call.mesh, shardings.in_order(order), ordered, runs_once=call.runs_once)


def _input_avals(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Returns the abstract value of each flat global input."""
    values: list[Any] = [global_value(v, call.mesh) for v in call.binding.variables]
    values += arrays
    values += [v.global_array if isinstance(v, PerReplica) else v for v in call.arguments.data]
    avals: list[Any] = jax.tree.leaves([abstract(value) for value in values])
    if call.arguments.counts is not None:
        avals.append(jax.ShapeDtypeStruct((num_replicas(call.mesh),), jnp.int32))
    return avals


_NAME = "replica_step"

step_p: Any = jex_core.Primitive(_NAME)
"""All equations of a step, which become a function of the lowered program as they are."""
step_p.multiple_results = True


def by_equation(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a traced step as a function that is traced to the equations it has."""
    function: Callable[..., list[Any]] = jex_core.jaxpr_as_fun(jaxpr)
    return function


def in_one_equation(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a traced step as a function that ``shard_map`` and ``scan`` trace to one equation.

    A step that prints, calls back or holds refs is traced equation by equation, since JAX looks for
    these in the outermost program; so is one that gets inputs for its constants, and one that JAX has
    yet to lower to its basic operations.
    """
    silent = all(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)
    if not silent or is_high(jaxpr) or any(isinstance(c, jax.core.Tracer) for c in jaxpr.consts):
        return by_equation(jaxpr)
    return lambda *inputs: step_p.bind(*inputs, call_jaxpr=jaxpr)


def _lowered(ctx: Any, *inputs: Any, call_jaxpr: ClosedJaxpr) -> Any:
    return mlir.core_call_lowering(ctx, *inputs, name=_NAME, call_jaxpr=call_jaxpr)


step_p.def_abstract_eval(lambda *_, call_jaxpr: call_jaxpr.out_avals)
mlir.register_lowering(step_p, _lowered)
