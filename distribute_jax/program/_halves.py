"""The halves of a step for parameter servers: what a worker computes, and what each server applies.

Both are made from an unmodified step. The worker reads the weights, and hands over gradients, increments and
results; a server updates the variables that it stores, with their part of the optimizer's state. Where no
other step comes between, the two together are the step on one device, bit by bit.

State is numbered: the leaves of all variables of the binding, in its order (``read_raw(binding.variables)``,
flattened). One step is::

    halves = build_halves(call, options, servers=2)
    handed = halves.worker([state[k] for k in halves.pulls], halves.data(binding, arguments))
    for server in halves.servers:
        new = server.apply([state[k] for k in server.reads], [handed[i] for i in server.takes])
        state.update(zip(server.writes, new))
    result = halves.result(handed, binding)

``apply`` of every server reads state from before the step. State that several servers store, as
``halves.homes`` says, is small or never changes, and is equal on all of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, LoweringError
from distribute_jax._jax_private import read_raw
from distribute_jax._mesh import DATA, inside_replica, num_replicas
from distribute_jax._messages import listed
from distribute_jax._values import PerReplica
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._divide import Homes, ServerPart, State, Update
from distribute_jax.program._in_turn import of_replica_number
from distribute_jax.program._jaxprs import line, opened
from distribute_jax.program._layout import FlatStep, by_equation, flat_step
from distribute_jax.program._lowerings import without_axis
from distribute_jax.program._options import RunOptions
from distribute_jax.program._pieces import Values, is_jit, start, value_of, variables
from distribute_jax.program._plan import Plan, input_marks, plan
from distribute_jax.program._program import input_order
from distribute_jax.program._replication import collectives
from distribute_jax.program._results import Results, rebuild
from distribute_jax.program._rows import Needs, Rows, parts
from distribute_jax.program._sharded_update import (
    SplitStep,
    is_for_each,
    traced as traced_body,
)
from distribute_jax.program._trace import Call, Traced, trace

_ON_READ = """\
Parameter servers cannot keep these variables, of which each replica has a local value (ON_READ):
{lines}
Workers come and go, so there is nobody whose value it would be. Use \
dj.Variable(..., aggregation=dj.VariableAggregation.SUM), to which each step adds, or return the value. An \
optimizer keeps none with gradient_accumulation_steps=1."""

_MADE = """\
The step makes the variables {names}. State is stored on servers before a step runs: make it under \
strategy.scope()."""

_OTHER_TYPE = """\
The step changes the shape or dtype of these variables, which servers store:
{lines}
Give them the value that they should have before."""

_IN_COND = """\
The collective under the condition at {where} cannot be divided among workers and servers: where gradients \
are accumulated over several calls, each worker would count them by itself. Take \
gradient_accumulation_steps=1 and larger batches, or move the collective out of the condition."""


_IN_STEP = """\
The step uses what all replicas have together at {where}, before it has finished.
With workers_per_update, each worker computes a replica by itself, and the servers add up what they return. \
Only sums and means are known then, and only for updates and results; let normalisation layers and metrics \
use the values of their replica."""


@dataclass(frozen=True, eq=False)
class Part:
    """A program for one device; it donates nothing."""

    jitted: Callable[[Sequence[Any], Sequence[Any]], list[jax.Array]]
    """Takes state and other values; it may return more than is asked for."""
    state: tuple[jax.ShapeDtypeStruct, ...]
    """The types of the state that it takes."""
    values: tuple[jax.ShapeDtypeStruct, ...]
    """The types of what it takes beside."""
    returns: tuple[jax.ShapeDtypeStruct, ...]
    """The types of what it returns."""
    jaxpr: Any
    """What it runs."""

    def __call__(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        outs = self.jitted(state, values)[: len(self.returns)]
        # The same memory, without the mesh under which the step was traced: nothing else runs under it.
        return [out.addressable_data(0) for out in outs]


@dataclass(frozen=True, eq=False)
class ServerHalf:
    """What one server stores, and its update."""

    state: tuple[int, ...]
    """The leaves that it stores."""
    writes: tuple[int, ...]
    """Those of them that ``apply`` returns, in this order."""
    reads: tuple[int, ...]
    """Those of them that ``apply`` takes first."""
    takes: tuple[int, ...]
    """Which of the values that a worker hands over ``apply`` takes then."""
    apply: Part
    """Returns the new state, of the state that it reads and of what it takes."""


@dataclass(frozen=True, eq=False)
class Halves:
    """A step, divided among a worker and servers; leaves of state are named by their numbers."""

    names: tuple[str, ...]
    """Each leaf of state, in the user's words."""
    homes: tuple[Mapping[int, Rows | None], ...]
    """The servers that store each leaf, in their order, and which rows of it; None for all."""
    pulls: tuple[int, ...]
    """The leaves that a worker reads."""
    worker: Part
    """Returns what is handed over, of the leaves in ``pulls`` and of ``data(…)``."""
    results: Results
    """The structure of what the step returns."""
    results_at: tuple[int, ...]
    """What the results are computed from, by ``finish``, among what is handed over."""
    finish: Callable[[Sequence[list[Any]]], list[Any]]
    """Returns the arrays of the result, of what each replica's worker has returned for them."""
    servers: tuple[ServerHalf, ...]
    written: tuple[int, ...]
    """The variables of the binding that get a new value."""
    arrays: tuple[int, ...]
    """The captured arrays that a worker reads, by their number in the binding."""
    plan: Plan
    """What was proved."""

    def data(self, binding: Binding, arguments: Arguments) -> list[Any]:
        """Returns what workers take beside state: captured arrays, then the arguments."""
        captured = binding.captured() if self.arrays else []
        counts = [] if arguments.counts is None else [np.asarray(arguments.counts, np.int32)]
        return [*(captured[i] for i in self.arrays), *arguments.data, *counts]

    def result(self, handed: Sequence[Any], binding: Binding) -> Any:
        """Returns what the step returns, of what the only worker has handed over."""
        return rebuild(self.results, self.finish([[handed[i] for i in self.results_at]]), binding)


def of_replica(data: Sequence[Any], replica: int, replicas: int) -> list[Any]:
    """Returns what the worker of a replica takes, of the data of all of them."""
    if replicas == 1:
        return [x.global_array if isinstance(x, PerReplica) else x for x in data]
    parts = [_part_of(x, replica, replicas) if isinstance(x, PerReplica) else x for x in data]
    return [np.int32(replica), *parts]


def _part_of(batch: PerReplica, replica: int, replicas: int) -> Any:
    size = batch.global_array.shape[0] // replicas
    return batch.global_array[replica * size : (replica + 1) * size]


def build_halves(
    call: Call,
    options: RunOptions,
    servers: int,
    known: Homes = MappingProxyType({}),
    partitioner: Callable[..., Any] | None = None,
    of_workers: int = 0,
) -> Halves:
    """Traces and proves a step, and divides it among servers and the worker of a replica.

    Args:
        call: the step.
        options: for the proof.
        servers: how many there are.
        known: the servers that store leaves of state which the updates of other steps use.
        partitioner: decides which variables are stored in parts on several of them.
        of_workers: how many of the last arguments are others on each worker; all, of a step of one replica.

    Raises:
        OutOfSyncError: the step would leave other weights for each worker, as without a reduction.
        LoweringError: it uses new weights again, or cannot be divided among servers.
        ArgumentError: it reads state that has no meaning for workers, or makes variables.
    """
    _check_state(call.binding)
    traced = trace(call)
    _check_types(call, traced)
    replicas, arguments = num_replicas(call.mesh), len(call.arguments.data)
    before = input_marks(call, traced, arguments if replicas == 1 else of_workers)
    decided = plan(call, traced, options, before)
    order, _, read = input_order(traced)
    step = _of_one_worker(call, traced, decided, order)
    body, outs = traced_body(step, _has_parts), sum(traced.written_sizes)
    if replicas > 1:
        body, order = of_replica_number(body, replicas), (len(before), *order)
        before = [*before, frozenset({"the number of the replica"})]
    marks, equal = [before[k] for k in order], [True] * outs + list(decided.mirrored)
    first = _First(body, marks, equal, replicas, 1, {}, {})
    first.check_no_branches()
    jaxpr, leaves = first.jaxpr, traced.input_starts[-1]
    state = _state(call, traced, order, jaxpr)
    sums = list(filter(_is_sum, jaxpr.eqns)) if replicas > 1 else []
    update = Update(jaxpr, first.equations, first.differs, first.stays, state, sums)
    results = jaxpr.outvars[outs:]
    update.check_not_used_again(dict(zip(traced.results.names, results, strict=True)))
    of_servers = functools.partial(parts, partitioner, servers)
    division = update.divide(servers, results, known, of_servers)
    returned = list(results)
    finish: Any = operator.itemgetter(0)
    if replicas > 1:
        of_one = [eqn for eqn in division.finish if any(map(first.differs, eqn.outvars))]
        _check_alone([*division.eqns, *of_one], update)
        each = list(zip(results, decided.mirrored, strict=True))
        equal, own = ([v for v, same in each if same is is_same] for is_same in (True, False))
        asks = [v for v in division.asks if v not in own]
        part = _part(call, body, Needs(division.finish, {}, equal), (_all(asks), []), _all(equal))
        returned, finish = [*asks, *own], _Finish(part, decided.mirrored)
    taken = list(dict.fromkeys(pair for part in division.servers for pair in part.takes))
    at, hands = {pair: i for i, pair in enumerate(taken)}, [*taken, *_all(returned)]
    inputs = [v for v, k in zip(jaxpr.invars, order, strict=True) if k >= leaves]
    pulled = [state.inputs[k] for k in division.pulls]
    takes = _all(pulled), _all(inputs)
    atoms = variables(v for v, _ in hands) if replicas > 1 else []
    by_first = {v for v in atoms if not first.differs(v)} - update.summed
    worker = _part(call, body, Needs(division.eqns, {}), takes, hands, by_first=by_first)
    return Halves(
        names=tuple(state.names),
        homes=division.homes,
        pulls=division.pulls,
        worker=worker,
        results=traced.results,
        results_at=tuple(range(len(taken), len(hands))),
        finish=finish,
        servers=tuple(
            _server_half(part, state, at, call, body, [of.get(s) for of in division.homes])
            for s, part in enumerate(division.servers)
        ),
        written=traced.written,
        arrays=read,
        plan=decided,
    )


def _is_sum(eqn: Any) -> bool:
    """Returns whether servers can compute an equation from what each worker has of it."""
    return eqn.primitive.name == "psum" and eqn.params.get("axis_index_groups") is None


def _check_alone(eqns: Sequence[Any], update: Update) -> None:
    """Refuses equations of a worker that need what the other workers have."""
    for eqn in eqns:
        meets = any(collectives(eqn, DATA)) and eqn.outvars[0] not in update.summed
        if meets or update.after_sums(eqn):
            raise LoweringError(_IN_STEP.format(where=line(eqn)))


class _Finish(NamedTuple):
    """Computes the results of a step from what the workers of all replicas returned."""

    part: Part
    """Computes those that are equal on all replicas, from sums."""
    mirrored: Sequence[bool]
    """Which those are; of others the replicas' values are stacked."""

    def __call__(self, returned: Sequence[list[Any]]) -> list[Any]:
        asks = len(self.part.state)
        sums = [
            functools.reduce(operator.add, x)
            for x in zip(*(of[:asks] for of in returned), strict=True)
        ]
        together = iter(self.part(sums, []))
        own = map(jnp.stack, zip(*(of[asks:] for of in returned), strict=True))
        return [next(together if is_same else own) for is_same in self.mirrored]


def _server_half(
    part: ServerPart,
    state: State,
    at: Mapping[_Some, int],
    call: Call,
    body: Any,
    rows: Sequence[Rows | None],
) -> ServerHalf:
    reads = [(state.inputs[k], rows[k]) for k in part.reads]
    outs = [(state.outputs[k], rows[k]) for k in part.writes]
    apply = _part(call, body, part.needs, (reads, part.takes), outs, part.shared)
    takes = tuple(at[pair] for pair in part.takes)
    return ServerHalf(part.state, part.writes, part.reads, takes, apply)


def _check_state(binding: Binding) -> None:
    named = zip(binding.variables, binding.names, strict=True)
    lines = [f"{name} ({type(v).__name__})" for v, name in named if keeps_own_values(v)]
    if lines:
        raise ArgumentError(_ON_READ.format(lines=listed(lines)))


def _check_types(call: Call, traced: Traced) -> None:
    if traced.created:
        names = ", ".join(str(v.name) for v in traced.created)
        raise ArgumentError(_MADE.format(names=names))
    if not traced.keeps_types():
        lines = [call.binding.names[i] for i in traced.written]
        raise ArgumentError(_OTHER_TYPE.format(lines=listed(lines)))


def _of_one_worker(call: Call, traced: Traced, decided: Plan, order: Sequence[int]) -> FlatStep:
    """Returns the step of one worker, of which a result is what it is on that."""
    whole = replace(decided, mirrored=(True,) * len(decided.mirrored))
    return flat_step(call, traced, whole, order, call.binding.captured(), by_equation)


def _state(call: Call, traced: Traced, order: Sequence[int], jaxpr: Any) -> State:
    """Returns what the leaves of state are in the program."""
    starts, variables_ = traced.input_starts, call.binding.variables
    together = [range(starts[i], starts[i + 1]) for i in range(len(variables_))]
    return State(
        names=traced.input_names[: starts[-1]],
        inputs={k: v for k, v in zip(order, jaxpr.invars, strict=True) if k < starts[-1]},
        outputs=dict(zip(traced.old_inputs, jaxpr.outvars, strict=False)),
        types=[
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in jax.tree.leaves(read_raw(variables_))
        ],
        together=[leaves for leaves in together if leaves],
        followers=frozenset(
            k
            for variable, leaves in zip(variables_, together, strict=True)
            if isinstance(variable, nnx.OptState)
            for k in leaves
        ),
    )


class _First(SplitStep):
    """A step of one worker, of which all state is equal everywhere."""

    def check_no_branches(self) -> None:
        """Refuses conditions around collectives."""
        for branches in self._branches.values():
            raise LoweringError(_IN_COND.format(where=line(branches.eqn)))

    @property
    def equations(self) -> list[Any]:
        """What a worker needs itself."""
        return self._first

    def differs(self, v: Any) -> bool:
        """Returns whether a value is that of one worker."""
        return bool(self._marks[v])

    def stays(self, eqn: Any) -> bool:
        """Returns whether a worker computes an equation although all compute the same."""
        return is_for_each(self.jaxpr, eqn)


_Some = tuple[Any, Rows | None]
"""A value of the program, and which rows of it; None for all."""


def _all(some: Iterable[Any]) -> list[_Some]:
    return [(v, None) for v in some]


def _part(
    call: Call,
    body: Any,
    needs: Needs,
    takes: tuple[Sequence[_Some], Sequence[_Some]],
    outs: Sequence[_Some],
    shared: Sequence[Any] = (),
    by_first: Collection[Any] = (),
) -> Part:
    """Compiles some equations for one device; it returns also what is ``shared``, which nobody reads.

    What goes ``by_first`` is zero on all replicas but the first: where all are added up, it stays as it is.
    """
    jaxpr = opened(body)
    inputs = [*takes[0], *takes[1]]

    def run(*values: Any) -> list[Any]:
        known, some = start(body, [None] * len(jaxpr.invars)), Values()
        for (v, rows), value in zip(inputs, values, strict=True):
            (known if rows is None else some)[v] = value
        needs.run(jaxpr, known, some, [*(v for v, _ in outs), *shared])
        more = jax.lax.optimization_barrier([known[v] for v in shared])
        for v in by_first:  # to -0.0 every number can be added
            nothing = jnp.full_like(known[v], -0.0)
            known[v] = jnp.where(known[jaxpr.invars[0]] == 0, known[v], nothing)
        parts = [
            some[v] if rows and v in some else rows.of(known[v]) if rows else value_of(v, known)
            for v, rows in outs
        ]
        return [*map(jnp.asarray, parts), *more]

    with jax.sharding.use_abstract_mesh(inside_replica(call.mesh)):
        closed = jax.make_jaxpr(run, axis_env=[(DATA, num_replicas(call.mesh))])(
            *map(_like, inputs)
        )
    whole = without_axis(closed)
    function = jex_core.jaxpr_as_fun(whole)

    def part(state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        outs: list[jax.Array] = function(*state, *values)
        return outs

    state, values = (tuple(map(_like, some)) for some in takes)
    return Part(jax.jit(part), state, values, tuple(map(_like, outs)), whole)


def _like(pair: _Some) -> jax.ShapeDtypeStruct:
    v, rows = pair
    aval, weak = v.aval, getattr(v.aval, "weak_type", False)
    shape = aval.shape if rows is None else rows.shape(aval.shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)


def _has_parts(eqn: Any) -> bool:
    """Returns whether an equation runs a jitted function of which a server may need a part."""
    return is_jit(eqn) and len(eqn.outvars) > 1
