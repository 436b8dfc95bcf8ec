"""Splits a step for parameter servers into what a worker computes and what each server applies.

The step is not modified. The worker reads the weights, and pushes gradients, increments and results; a
server updates the variables that it stores, with their part of the optimizer's state. If no other step comes
between, the two together compute the bits of the step on one device.

State is numbered: the leaves of all variables of the binding, in its order (``read_raw(binding.variables)``,
flattened). One step is::

    halves = build_halves(call, options, servers=2)
    handed = halves.worker([state[k] for k in halves.pulls], halves.data(binding, arguments))
    for server in halves.servers:
        new = server.apply([state[k] for k in server.reads], [handed[i] for i in server.takes])
        state.update(zip(server.writes, new))
    result = halves.result(handed, binding)

``apply`` of every server reads state from before the step. Leaves that several servers store whole, by
``halves.homes``, are small or never change, and are equal on all of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, LoweringError, log_once
from distribute_jax._jax_private import read_raw
from distribute_jax._mesh import DATA, num_replicas
from distribute_jax._messages import listed
from distribute_jax._values import PerReplica
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._divide import Division, Homes, ServerPart, State, Update
from distribute_jax.program._in_turn import of_replica_id
from distribute_jax.program._jaxprs import collectives, line, name, variables, with_inner
from distribute_jax.program._lowerings import FlatStep, by_equation, flat_step
from distribute_jax.program._options import RunOptions
from distribute_jax.program._part import Part, Some, all_of, build_part
from distribute_jax.program._plan import Plan, input_marks, plan
from distribute_jax.program._program import input_order
from distribute_jax.program._results import Results, rebuild
from distribute_jax.program._rows import (
    ZERO,
    Ids,
    Lookup,
    Lookups,
    Needs,
    Rows,
    parts,
    takes_rows,
    unchanged,
)
from distribute_jax.program._sharded_update import (
    SplitStep,
    is_bound_to_replicas,
    traced as traced_body,
)
from distribute_jax.program._trace import Call, Traced, trace

_ON_READ = """\
Parameter servers cannot keep these variables, of which each replica has a local value (ON_READ):
{lines}
Workers come and go, so no worker can keep the local value. Use \
dj.Variable(..., aggregation=dj.VariableAggregation.SUM), to which each step adds, or return the value. \
Make an optimizer that accumulates gradients under strategy.scope()."""

_CREATES_VARIABLES = """\
The step makes the variables {names}. State is stored on servers before a step runs: make it under \
strategy.scope()."""

_CHANGES_TYPE = """\
The step changes the shape or dtype of these variables, which servers store:
{lines}
Give them the value that they should have before."""

_COLLECTIVE_IN_COND = """\
The collective under the condition at {where} cannot be divided among workers and servers. Move it out of \
the condition."""

_COLLECTIVE_IN_STEP = """\
The step uses the result of a collective at {where}, before it has finished.
With workers_per_update, each worker computes one replica, and the servers add up what the workers return. \
Only sums and means are supported, and only for updates and results; let normalisation layers and metrics \
use the values of their replica."""


@dataclass(frozen=True, eq=False)
class ServerHalf:
    """The state and the update of one server."""

    state: tuple[int, ...]
    """The leaves that it stores."""
    writes: tuple[int, ...]
    """The leaves that ``apply`` returns, in order."""
    reads: tuple[int, ...]
    """The leaves that ``apply`` takes first."""
    takes: tuple[int, ...]
    """The indices of the worker's outputs that ``apply`` takes after them."""
    apply: Part
    """Returns the new state."""


class LookupHalf(NamedTuple):
    """The tables and gradients that are sent by rows; rows are named by the index of a lookup."""

    compute: Any
    """Returns the indices of lookups, from captured arrays and arguments."""
    lookups: Sequence[Lookup]
    pulls: Sequence[int | None]
    """For each leaf that a worker reads, the lookup that names its rows; None for all rows."""
    takes: Sequence[Sequence[tuple[int, Any] | None]]
    """For each server and each value that it takes, the lookup and the server's rows; None for all rows."""
    ids: Sequence[Sequence[tuple[int, Any]]]
    """For each server, the lookups whose row ids it takes after them, with the server's rows."""


@dataclass(frozen=True, eq=False)
class Halves:
    """A step split between a worker and servers; leaves of state are named by their numbers."""

    names: tuple[str, ...]
    """The name of each leaf of state, for messages."""
    homes: tuple[Mapping[int, Rows | None], ...]
    """For each leaf, the servers that store it, in order, and which rows; None for all rows."""
    pulls: tuple[int, ...]
    """The leaves that a worker reads."""
    worker: Part
    """Returns the worker's outputs, from the leaves in ``pulls`` and from ``data(…)``."""
    results: Results
    """The structure of what the step returns."""
    results_at: tuple[int, ...]
    """The indices of the worker's outputs that ``finish`` takes."""
    finish: Callable[[Sequence[list[Any]]], list[Any]]
    """Returns the arrays of the result, from the outputs of each replica's worker."""
    servers: tuple[ServerHalf, ...]
    written: tuple[int, ...]
    """The variables of the binding that get a new value."""
    lookups: LookupHalf | None
    """Tables that are read and updated by rows, if any."""
    arrays: tuple[int, ...]
    """The captured arrays that a worker reads, by their index in the binding."""
    plan: Plan
    """What was proved of the step."""

    def data(self, binding: Binding, arguments: Arguments) -> list[Any]:
        """Returns the worker's inputs beside state: captured arrays, then arguments."""
        captured = binding.captured_arrays() if self.arrays else []
        counts = [] if arguments.counts is None else [np.asarray(arguments.counts, np.int32)]
        return [*(captured[i] for i in self.arrays), *arguments.data, *counts]

    def result(self, handed: Sequence[Any], binding: Binding) -> Any:
        """Returns the result of the step from the outputs of its only worker."""
        return rebuild(self.results, self.finish([[handed[i] for i in self.results_at]]), binding)


def of_replica(data: Sequence[Any], replica: int, replicas: int) -> list[Any]:
    """Returns the inputs of one replica's worker from those of all replicas."""
    if replicas == 1:
        return [x.global_array if isinstance(x, PerReplica) else x for x in data]

    def part_of(batch: PerReplica) -> Any:
        size = batch.global_array.shape[0] // replicas
        return batch.global_array[replica * size : (replica + 1) * size]

    return [np.int32(replica), *(part_of(x) if isinstance(x, PerReplica) else x for x in data)]


def build_halves(
    call: Call,
    options: RunOptions,
    servers: int,
    known: Homes = MappingProxyType({}),
    partitioner: Callable[..., Any] | None = None,
    of_workers: int = 0,
    sparse: str | None = None,
) -> Halves:
    """Traces and proves a step, and splits it between servers and the worker of a replica.

    ``known`` are the servers of leaves that earlier steps use. The last ``of_workers`` arguments differ
    between workers. A step of one replica reads and updates ``sparse`` tables by rows; with ``"lazy"`` rows
    that were not looked up stay, whatever the optimizer would do to them.
    """
    traced, decided, body, order, read, first = _proved(call, options, of_workers)
    replicas, jaxpr, leaves = num_replicas(call.mesh), first.jaxpr, traced.input_starts[-1]
    state = _state(call, traced, order, jaxpr)
    sums = list(filter(_is_sum, jaxpr.eqns)) if replicas > 1 else []
    update = Update(jaxpr, first.equations, first.differs, first.is_for_each, state, sums)
    results = jaxpr.outvars[sum(traced.written_sizes) :]
    update.check_not_used_again(dict(zip(traced.results.names, results, strict=True)))
    of_servers = functools.partial(parts, partitioner, servers)
    division = update.divide(servers, results, known, of_servers)
    returned, finish = _finishing(call, body, division, first, update, results, decided)
    inputs = [v for v, k in zip(jaxpr.invars, order, strict=True) if k >= leaves]
    pulled = [state.inputs[k] for k in division.pulls]
    taken_rows = [pair for part in division.servers for pair in part.takes]
    look = Lookups(
        division.eqns,
        {state.inputs[k]: state.names[k] for k in division.pulls if sparse and replicas == 1},
        set(state.inputs.values()),
        [v for v, _ in taken_rows],
        variables([*returned, *update.read_by_effects]),
    )
    handed: dict[Some, None] = dict.fromkeys((v, look.hands.get(v, of)) for v, of in taken_rows)
    at, hands = {pair: i for i, pair in enumerate(handed)}, [*handed, *all_of(returned)]
    takes = [(v, look.tables.get(v)) for v in pulled], all_of(inputs)
    atoms = variables(v for v, _ in hands) if replicas > 1 else []
    by_first = {v for v in atoms if not first.differs(v)} - update.summed
    numbers = [*look.ids.values()]
    worker = build_part(call, body, look.needs, takes, hands, ids=numbers, by_first=by_first)
    built = [
        _ServerPart(part, state, look, [of.get(s) for of in division.homes], sparse)
        for s, part in enumerate(division.servers)
    ]
    return Halves(
        names=tuple(state.names),
        homes=division.homes,
        pulls=division.pulls,
        worker=worker,
        results=traced.results,
        results_at=tuple(range(len(handed), len(hands))),
        finish=finish,
        servers=tuple(of.half(call, body, at) for of in built),
        lookups=_lookup_half(call, body, look, pulled, inputs, built) if numbers else None,
        written=traced.written,
        arrays=read,
        plan=decided,
    )


class _Proved(NamedTuple):
    """The step of one worker, traced and proved."""

    traced: Traced
    plan: Plan
    body: Any
    """The worker's program."""
    order: Sequence[int]
    """For each input of the program, its index among those of the step."""
    arrays: tuple[int, ...]
    first: _WorkerStep


def _proved(call: Call, options: RunOptions, of_workers: int) -> _Proved:
    _check_state(call.binding)
    traced = trace(call)
    _check_types(call, traced)
    replicas, arguments = num_replicas(call.mesh), len(call.arguments.data)
    before = input_marks(call, traced, arguments if replicas == 1 else of_workers)
    decided = plan(call, traced, options, before)
    order, _, arrays = input_order(traced)
    body = traced_body(_of_one_worker(call, traced, decided, order), _has_parts)
    if replicas > 1:
        body, order = of_replica_id(body, replicas), (len(before), *order)
        before = [*before, frozenset({"the replica id"})]
    equal = [True] * sum(traced.written_sizes) + list(decided.mirrored)
    first = _WorkerStep(body, [before[k] for k in order], equal, replicas, 1, {}, {})
    first.check_no_branches()
    return _Proved(traced, decided, body, order, arrays, first)


def _is_sum(eqn: Any) -> bool:
    """True if servers can reduce the values of all workers for this equation."""
    return eqn.primitive.name == "psum" and eqn.params.get("axis_index_groups") is None


def _check_one_worker(eqns: Sequence[Any], update: Update) -> None:
    """Refuses equations that need values of other workers."""
    for eqn in eqns:
        meets = any(collectives(eqn, DATA)) and eqn.outvars[0] not in update.summed
        if meets or update.after_sums(eqn):
            raise LoweringError(_COLLECTIVE_IN_STEP.format(where=line(eqn)))


def _finishing(
    call: Call,
    body: Any,
    division: Division,
    first: _WorkerStep,
    update: Update,
    results: Sequence[Any],
    decided: Plan,
) -> tuple[list[Any], Any]:
    """Returns a worker's outputs for results, and a function from those of all workers to the results."""
    if num_replicas(call.mesh) == 1:
        return list(results), operator.itemgetter(0)
    of_one = [eqn for eqn in division.finish if any(map(first.differs, eqn.outvars))]
    _check_one_worker([*division.eqns, *of_one], update)
    each = list(zip(results, decided.mirrored, strict=True))
    equal, unequal = ([v for v, same in each if same is is_same] for is_same in (True, False))
    asks = [v for v in division.asks if v not in unequal]
    needs = Needs(division.finish, {}, equal)
    part = build_part(call, body, needs, (all_of(asks), []), all_of(equal))
    return [*asks, *unequal], _Finish(part, decided.mirrored)


class _Finish(NamedTuple):
    """Computes the results of a step from the outputs of all workers."""

    part: Part
    """Computes mirrored results from sums over the workers."""
    mirrored: Sequence[bool]
    """Which results are mirrored; others are stacked."""

    def __call__(self, returned: Sequence[list[Any]]) -> list[Any]:
        asks = len(self.part.state)
        sums = [
            functools.reduce(operator.add, x)
            for x in zip(*(of[:asks] for of in returned), strict=True)
        ]
        together = iter(self.part(sums, []))
        unequal = map(jnp.stack, zip(*(of[asks:] for of in returned), strict=True))
        return [next(together if is_same else unequal) for is_same in self.mirrored]


def _lookup_half(
    call: Call,
    body: Any,
    look: Lookups,
    pulled: Sequence[Any],
    inputs: Sequence[Any],
    servers: Sequence[_ServerPart],
) -> LookupHalf:
    number = {id(ids): i for i, ids in enumerate(look.ids.values())}
    atoms, lookups = look.indices()
    needs = Needs(look.before(atoms), {}, atoms)
    return LookupHalf(
        build_part(call, body, needs, ([], all_of(inputs)), all_of(atoms)),
        lookups,
        [number[id(look.tables[v])] if v in look.tables else None for v in pulled],
        [
            [
                (number[id(look.hands[v])], rows) if v in look.hands else None
                for v, rows in of.part.takes
            ]
            for of in servers
        ],
        [[(number[id(ids)], rows) for ids, rows in of.local] for of in servers],
    )


class _ServerPart:
    """Builds the update of one server, with tables by rows."""

    def __init__(
        self,
        part: ServerPart,
        state: State,
        look: Lookups,
        rows: Sequence[Rows | None],
        sparse: str | None,
    ) -> None:
        self.part, self._state, self._look, self._rows = part, state, look, rows
        self.local: dict[tuple[Ids, Any], Ids] = {}
        """For each lookup and the rows stored here, the ids among them."""
        takes: list[Some] = []
        of: Any
        for v, of in part.takes:
            if (ids := look.hands.get(v)) is not None:
                whole: Any = of or ids.rows
                size = whole.stop - whole.first
                mine = Ids(min(ids.number, size), Rows(0, size), of)
                takes.append((v, self.local.setdefault((ids, of), mine)))
            else:
                takes.append((v, of))
        self._takes = takes
        self._needs = part.needs
        self._touched: dict[Any, Any] = {}
        if self.local:
            self._touch(sparse)

    def _touch(self, sparse: str | None) -> None:
        """Restricts the update of a table to the rows that were looked up, if others are unchanged."""
        part, state = self.part, self._state
        zeros = {v: ZERO for v, of in self._takes if isinstance(of, Ids)}
        inputs = {state.inputs[k]: state.inputs[k] for k in part.reads}
        left = unchanged(part.needs.eqns, zeros | inputs)
        touched: dict[Any, Any] = {}
        asked: dict[Any, Any] = {}
        for k in part.writes:
            out = state.outputs[k]
            rows = Needs(part.needs.eqns, {out: self._rows[k] or Rows(0, 0)}).rows
            some: set[Any] = {of for v, of in self._takes if v in zeros and v in rows}
            if len(some) != 1:
                continue
            (ids,) = some
            if sparse == "lazy" or left.get(out) is state.inputs.get(k):
                touched[out], asked[out] = state.inputs[k], ids
            elif k not in state.followers:
                log_once(_ALL_ROWS_UPDATED, state.names[k], about=state.names[k])
        others = {v: rows for v, rows in part.needs.rows.items() if v in state.outputs.values()}
        whole = [
            state.outputs[k] for k in part.writes if state.outputs[k] not in {**others, **asked}
        ]
        needs = Needs(part.needs.eqns, others | asked, whole)
        parts = [state.inputs[k] for k in part.reads if self._rows[k]]
        parts += [v for v, of in part.takes if of is not None]
        if not any(v in needs.whole for v in (*touched.values(), *touched, *parts)):
            self._needs, self._touched = needs, touched

    def half(self, call: Call, body: Any, at: Mapping[Some, int]) -> ServerHalf:
        """Builds the server's program."""
        part, state = self.part, self._state
        reads = [(state.inputs[k], self._rows[k]) for k in part.reads]
        outs = [(state.outputs[k], self._rows[k]) for k in part.writes]
        apply = build_part(
            call, body, self._needs, (reads, self._takes), outs, part.shared,
            [*self.local.values()], self._touched,
        )  # fmt: skip
        takes = tuple(at[v, self._look.hands.get(v, of)] for v, of in part.takes)
        return ServerHalf(part.state, part.writes, part.reads, takes, apply)


_ALL_ROWS_UPDATED = """\
The update of %s computes all of its rows at each step, since its optimizer changes rows that no example \
looked up, as Adam and momentum do. ParameterServerStrategy(sparse="lazy") leaves those rows unchanged, and \
the numbers differ then."""


def _check_state(binding: Binding) -> None:
    named = zip(binding.variables, binding.names, strict=True)
    lines = [f"{name} ({type(v).__name__})" for v, name in named if keeps_own_values(v)]
    if lines:
        raise ArgumentError(_ON_READ.format(lines=listed(lines)))


def _check_types(call: Call, traced: Traced) -> None:
    if traced.created:
        names = ", ".join(str(v.name) for v in traced.created)
        raise ArgumentError(_CREATES_VARIABLES.format(names=names))
    if not traced.keeps_types():
        lines = [call.binding.names[i] for i in traced.written]
        raise ArgumentError(_CHANGES_TYPE.format(lines=listed(lines)))


def _of_one_worker(call: Call, traced: Traced, decided: Plan, order: Sequence[int]) -> FlatStep:
    """Returns the step of one worker, whose results are not combined."""
    whole = replace(decided, mirrored=(True,) * len(decided.mirrored))
    return flat_step(call, traced, whole, order, call.binding.captured_arrays(), by_equation)


def _state(call: Call, traced: Traced, order: Sequence[int], jaxpr: Any) -> State:
    """Returns the inputs, outputs and types of state in the program."""
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


class _WorkerStep(SplitStep):
    """The split step of one worker; state is equal on all of them."""

    def is_for_each(self, eqn: Any) -> bool:
        """True if an equation is bound to replicas; servers can run one that only refers to the mesh."""
        return is_bound_to_replicas(eqn)

    def check_no_branches(self) -> None:
        """Refuses conditions around collectives."""
        for branches in self._branches.values():
            raise LoweringError(_COLLECTIVE_IN_COND.format(where=line(branches.eqn)))

    @property
    def equations(self) -> list[Any]:
        """The equations that a worker must run."""
        return self._first

    def differs(self, v: Any) -> bool:
        """True if a value differs between workers."""
        return bool(self._marks[v])


def _has_parts(eqn: Any) -> bool:
    """True for a jitted function of which a server may need only some results or rows."""
    return name(eqn) == "jit" and (len(eqn.outvars) > 1 or any(map(takes_rows, with_inner(eqn))))
