"""The traced step as a function of one replica, and how its arrays are sharded over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding

from distribute_jax._jax_private import is_high
from distribute_jax._mesh import DATA, mirrored_sharding, split_sharding
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import FROM_OLD, Combine, combined, keeps_own_values
from distribute_jax.program._plan import Plan
from distribute_jax.program._replication_rules import ClosedJaxpr
from distribute_jax.program._trace import Call, Traced, abstract

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
        return [self.sharded_out.get(i, usual[whole]) for i, whole in enumerate(self.mirrored)]

    def in_order(self, order: Sequence[int]) -> StepShardings:
        """Returns the layouts of a program that takes only these inputs, in this order."""
        at = {i: position for position, i in enumerate(order)}
        return replace(
            self,
            stacked=tuple(self.stacked[i] for i in order),
            split=tuple(self.split[i] for i in order),
            sharded_in={at[i]: sharding for i, sharding in self.sharded_in.items() if i in at},
        )


def step_shardings(
    call: Call, traced: Traced, plan: Plan, kept: Sequence[NamedSharding | None] = ()
) -> StepShardings:
    """Returns the shardings of inputs and outputs over the mesh.

    Args:
        call: what was traced.
        traced: the step.
        plan: what becomes of its outputs.
        kept: for each flat input that is state, the sharding over the replicas that it keeps.
    """
    _, arrays, _, counts = traced.sizes
    own = [
        keeps_own_values(variable)
        for variable in call.binding.variables
        for _ in jax.tree.leaves(variable.get_raw_value())
    ]
    whole = [False] * arrays
    batch = [isinstance(value, PerReplica) for value in call.arguments.data]
    stacked = [
        b and v.layout is Layout.STACKED for b, v in zip(batch, call.arguments.data, strict=True)
    ]
    more = [False] * counts
    sharded = {i: s for i, s in enumerate(kept) if s is not None and not own[i]}
    ins, outs = traced.jaxpr.jaxpr.invars, traced.jaxpr.jaxpr.outvars
    return StepShardings(
        stacked=(*own, *whole, *stacked, *more),
        split=(*own, *whole, *batch, *more),
        mirrored=(*(rule is not Combine.OWN for rule in plan.combine), *plan.mirrored),
        state=len(plan.combine),
        sharded_in=sharded,
        sharded_out={
            out: sharded[old]
            for out, old in enumerate(_old_inputs(traced))
            if old in sharded and ins[old].aval.shape == outs[out].aval.shape
        },
    )


def used_inputs(traced: Traced) -> list[bool]:
    """Returns for each flat input whether the program reads it or hands it on."""
    jaxpr = traced.jaxpr.jaxpr
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jex_core.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    return [v in read for v in jaxpr.invars]


def replica_function(
    traced: Traced, plan: Plan, shardings: StepShardings, arrays: Sequence[Any], evaluate: Evaluate
) -> Callable[..., list[jax.Array]]:
    """Returns the program of one replica over all flat inputs, as a lowering will call it."""
    state = len(plan.combine)
    old = _old_inputs(traced)
    first_array = traced.sizes[0]
    # Arrays captured where nothing can be assigned are constants of the trace: read them as inputs.
    at = {id(array): first_array + i for i, array in enumerate(arrays)}

    def one_replica(*flat: jax.Array) -> list[jax.Array]:
        inputs = [
            x[0] if stacked else x for x, stacked in zip(flat, shardings.stacked, strict=True)
        ]
        consts = [inputs[at[id(c)]] if id(c) in at else c for c in traced.jaxpr.consts]
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
        return new + [
            out if mirrored else out[None]
            for out, mirrored in zip(outs[state:], plan.mirrored, strict=True)
        ]

    return one_replica


def _old_inputs(traced: Traced) -> list[int]:
    """Returns for each state output, the flat input that held the old value, where it has one."""
    starts = traced.input_starts
    return [
        starts[index] + k
        for index, size in zip(traced.written, traced.written_sizes, strict=True)
        for k in range(size)
    ]


def input_avals(call: Call, traced: Traced) -> list[Any]:
    """Returns the abstract value of each flat global input."""
    values: list[Any] = [v.get_raw_value() for v in call.binding.variables]
    values += traced.arrays
    avals = jax.tree.leaves([abstract(value) for value in values])
    for value in call.arguments.data:
        avals.append(abstract(value.global_array if isinstance(value, PerReplica) else value))
    replicas = call.mesh.shape[DATA]
    return avals + [jax.ShapeDtypeStruct((replicas,), jnp.int32)] * traced.sizes[3]


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
