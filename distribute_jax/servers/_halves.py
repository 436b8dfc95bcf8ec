"""Splits a step for parameter servers into what a worker computes and what each server applies.

The step is not modified. The worker reads the weights, and pushes gradients, increments and results; a
server updates the variables that it stores, with their part of the optimizer's state. If no other step comes
between, the two together compute the bits of the step on one device.

State is numbered: the leaves of all variables of the binding, in its order (``read_raw(binding.variables)``,
flattened). One step is::

    halves = build_halves(call, servers, known, partitioner, of_workers, sparse)
    handed = halves.worker([state[k] for k in halves.pulls], halves.data(binding, arguments))
    for server in halves.servers:
        new = server.apply([state[k] for k in server.reads], [handed[i] for i in server.takes])
        state.update(zip(server.writes, new))
    result = bound.result(halves.finish([[handed[i] for i in halves.results_at]]))

``apply`` of every server reads state from before the step. Leaves that several servers store whole, by
``halves.placement``, are small or never change, and are equal on all of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

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
from distribute_jax.program._jaxprs import (
    INLINED,
    called_body,
    collectives,
    equations_before,
    line,
    name,
    shared_scalars,
    variables,
)
from distribute_jax.program._lowerings import FlatStep, by_equation, flat_step
from distribute_jax.program._options import default_run_options
from distribute_jax.program._plan import Plan, input_marks, plan
from distribute_jax.program._program import input_order
from distribute_jax.program._replica_scan import of_replica_id
from distribute_jax.program._results import Results
from distribute_jax.program._sharded_update import traced as traced_body
from distribute_jax.program._trace import Call, Traced, trace
from distribute_jax.servers._device_program import (
    DeviceProgram,
    build_device_program,
    export_program,
    whole,
)
from distribute_jax.servers._divide import Division, Placement, ServerPart, State, Update
from distribute_jax.servers._rows import (
    ZERO,
    Lookup,
    Lookups,
    Needs,
    RowIds,
    Rows,
    Selected,
    parts,
    unchanged,
)

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

_COLLECTIVE_IN_STEP = """\
The step uses the result of a collective at {where}, before it has finished.
With workers_per_update, each worker computes one replica, and the servers add up what the workers return. \
Only sums and means are supported, and only for updates and results; let normalisation layers and metrics \
use the values of their replica."""


Build = Callable[..., DeviceProgram]
"""``build_device_program`` for the equations of one step."""


@dataclass(frozen=True, eq=False)
class ServerHalf:
    """The update of one server."""

    writes: tuple[int, ...]
    """The leaves that ``apply`` returns, in order."""
    reads: tuple[int, ...]
    """The leaves that ``apply`` takes first."""
    takes: tuple[int, ...]
    """The indices of the worker's outputs that ``apply`` takes after them."""
    apply: DeviceProgram
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
    placement: tuple[Mapping[int, Rows | None], ...]
    """For each leaf, the servers that store it, in order, and which rows; None for all rows."""
    pulls: tuple[int, ...]
    """The leaves that a worker reads."""
    worker: DeviceProgram
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

    @functools.cached_property
    def exported(self) -> list[Any]:
        """The bytes of the worker's half, and of what computes the indices of its lookups."""
        parts = [self.worker, *([self.lookups.compute] if self.lookups else [])]
        data = [export_program(part, [jax.default_backend()]) for part in parts]
        return [np.frombuffer(of_part, np.uint8) for of_part in data]

    def data(self, binding: Binding, arguments: Arguments) -> list[Any]:
        """Returns the worker's inputs beside state: captured arrays, then arguments."""
        captured = binding.captured_arrays() if self.arrays else []
        counts = [] if arguments.counts is None else [np.asarray(arguments.counts, np.int32)]
        return [*(captured[i] for i in self.arrays), *arguments.data, *counts]


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
    servers: int,
    known: Placement,
    partitioner: Callable[..., Any] | None,
    of_workers: int,
    sparse: str | None,
) -> Halves:
    """Traces and proves a step, and splits it between servers and the worker of a replica.

    ``known`` are the servers of leaves that earlier steps use. The last ``of_workers`` arguments differ
    between workers. A step of one replica reads and updates ``sparse`` tables by rows; with ``"lazy"`` rows
    that were not looked up stay, whatever the optimizer would do to them.
    """
    _check_state(call.binding)
    traced = trace(call)
    _check_types(call, traced)
    replicas, arguments = num_replicas(call.mesh), len(call.arguments.data)
    marks = input_marks(call, traced, arguments if replicas == 1 else of_workers)
    decided = plan(call, traced, default_run_options(), marks)
    order, _, arrays = input_order(traced)
    body = traced_body(_of_one_worker(call, traced, decided, order), _is_inlined)
    if replicas > 1:
        body, order = of_replica_id(body, call.mesh), (len(marks), *order)
        marks = [*marks, frozenset({"the replica id"})]
    jaxpr, leaves = body.jaxpr, traced.input_starts[-1]
    state = _state(call, traced, order, jaxpr)
    update = Update(jaxpr, [marks[k] for k in order], state, replicas)
    results = jaxpr.outvars[len(traced.old_inputs) :]
    update.check_not_used_again(dict(zip(traced.results.names, results, strict=True)))
    division = update.divide(
        servers, results, known, functools.partial(parts, partitioner, servers)
    )
    build = functools.partial(build_device_program, call, body)
    returned, finish = list(results), operator.itemgetter(0)
    if replicas > 1:
        returned, finish = _finishing(build, division, update, results, decided.mirrored)
    inputs = [v for v, k in zip(jaxpr.invars, order, strict=True) if k >= leaves]
    pulled = [state.inputs[k] for k in division.pulls]
    sent = [pair for part in division.servers for pair in part.takes]
    lookups = Lookups(
        division.eqns,
        {state.inputs[k]: state.names[k] for k in division.pulls if sparse and replicas == 1},
        set(state.inputs.values()),
        [v for v, _ in sent],
        variables([*returned, *update.read_by_effects]),
    )
    to_servers = list(dict.fromkeys((v, lookups.gradients.get(v, rows)) for v, rows in sent))
    outs = [*to_servers, *whole(returned)]
    of_all = variables(v for v, _ in outs) if replicas > 1 else []
    worker = build(
        lookups.needs, [(v, lookups.tables.get(v)) for v in pulled], whole(inputs), outs,
        by_first={v for v in of_all if not update.differs(v)} - update.summed,
    )  # fmt: skip
    at = {selected: i for i, selected in enumerate(to_servers)}
    halves = [
        _server_half(build, update, part, lookups, [o.get(s) for o in division.owners], sparse, at)
        for s, part in enumerate(division.servers)
    ]
    return Halves(
        names=tuple(state.names),
        placement=division.owners,
        pulls=division.pulls,
        worker=worker,
        results=traced.results,
        results_at=tuple(range(len(to_servers), len(outs))),
        finish=finish,
        servers=tuple(halves),
        lookups=_lookup_half(build, division, lookups, pulled, inputs) if lookups.ids else None,
        written=traced.written,
        arrays=arrays,
        plan=decided,
    )


def _check_one_worker(eqns: Sequence[Any], update: Update) -> None:
    """Refuses equations that need values of other workers."""
    for eqn in eqns:
        meets = any(collectives(eqn, DATA)) and eqn.outvars[0] not in update.summed
        if meets or update.after_sums(eqn):
            raise LoweringError(_COLLECTIVE_IN_STEP.format(where=line(eqn)))


def _finishing(
    build: Build,
    division: Division,
    update: Update,
    results: Sequence[Any],
    mirrored: Sequence[bool],
) -> tuple[list[Any], Any]:
    """Returns a worker's outputs for results, and a function from those of all workers to the results."""
    of_one = [eqn for eqn in division.finish if any(map(update.differs, eqn.outvars))]
    _check_one_worker([*division.eqns, *of_one], update)
    each = list(zip(results, mirrored, strict=True))
    equal, unequal = ([v for v, same in each if same is is_same] for is_same in (True, False))
    addends = [v for v in division.addends if v not in unequal]
    part = build(Needs(division.finish, {}, equal), whole(addends), [], whole(equal))
    return [*addends, *unequal], functools.partial(_finished, part, mirrored)


def _finished(
    part: DeviceProgram, mirrored: Sequence[bool], returned: Sequence[list[Any]]
) -> list[Any]:
    """Returns the results of a step from the outputs of all workers.

    ``part`` computes the ``mirrored`` ones from sums over the workers; others are stacked.
    """
    addends = len(part.state)
    of_all = zip(*(of[:addends] for of in returned), strict=True)
    together = iter(part([functools.reduce(operator.add, x) for x in of_all], []))
    unequal = map(jnp.stack, zip(*(of[addends:] for of in returned), strict=True))
    return [next(together if is_same else unequal) for is_same in mirrored]


def _lookup_half(
    build: Build, division: Division, lookups: Lookups, pulled: Sequence[Any], inputs: Sequence[Any]
) -> LookupHalf:
    number = {ids: i for i, ids in enumerate(lookups.ids.values())}
    indices, facts = lookups.indices()
    of_servers = [
        [
            (v in lookups.gradients and (number[lookups.gradients[v]], rows)) or None
            for v, rows in part.takes
        ]
        for part in division.servers
    ]
    return LookupHalf(
        build(
            Needs(equations_before(lookups.eqns, indices), {}, indices),
            [],
            whole(inputs),
            whole(indices),
        ),
        facts,
        [number[lookups.tables[v]] if v in lookups.tables else None for v in pulled],
        of_servers,
        [list(dict.fromkeys(filter(None, of_server))) for of_server in of_servers],
    )


def _server_half(
    build: Build,
    update: Update,
    part: ServerPart,
    lookups: Lookups,
    rows: Sequence[Rows | None],
    sparse: str | None,
    at: Mapping[Selected, int],
) -> ServerHalf:
    """Builds the program of a server, which stores these ``rows`` of each leaf.

    ``at`` are the worker's outputs for servers.
    """
    state, local = update.state, dict[Any, RowIds]()
    takes = list[Selected]()
    for v, of in part.takes:
        ids, of_server = lookups.gradients.get(v), cast("Rows | None", of)
        takes.append((v, local.setdefault((ids, of), ids.among(of_server)) if ids else of))
    needs, touched = part.needs, dict[Any, Any]()
    if local:
        needs, touched = _only_looked_up(part, state, takes, rows, sparse)
    apply = build(
        needs,
        [(state.inputs[k], rows[k]) for k in part.reads],
        takes,
        [(state.outputs[k], rows[k]) for k in part.writes],
        shared_scalars(part.needs.eqns, update.jaxpr),
        touched,
    )
    taken = tuple(at[v, lookups.gradients.get(v, of)] for v, of in part.takes)
    return ServerHalf(part.writes, part.reads, taken, apply)


def _only_looked_up(
    part: ServerPart,
    state: State,
    takes: Sequence[Selected],
    rows: Sequence[Rows | None],
    sparse: str | None,
) -> tuple[Needs, dict[Any, Any]]:
    """Restricts the update of tables to the rows that were looked up, if others are unchanged.

    Returns what the update needs then, and the old value of each new one of which only these rows change.
    """
    gradients = {v: of for v, of in takes if isinstance(of, RowIds)}
    inputs = {state.inputs[k]: state.inputs[k] for k in part.reads}
    others = unchanged(part.needs.eqns, dict.fromkeys(gradients, ZERO) | inputs)
    touched, wanted = dict[Any, Any](), dict[Any, Any]()
    for k in part.writes:
        out = state.outputs[k]
        needed = Needs(part.needs.eqns, {out: rows[k] or Rows(0, 0)}).rows
        read = {ids for v, ids in gradients.items() if v in needed}
        if len(read) != 1:
            continue
        if sparse == "lazy" or others.get(out) is state.inputs.get(k):
            touched[out], wanted[out] = state.inputs[k], read.pop()
        elif k not in state.followers:
            log_once(_ALL_ROWS_UPDATED, state.names[k], about=state.names[k])
    outs = [state.outputs[k] for k in part.writes]
    wanted = {v: of for v, of in part.needs.rows.items() if v in outs} | wanted
    needs = Needs(part.needs.eqns, wanted, [v for v in outs if v not in wanted])
    divided = [state.inputs[k] for k in part.reads if rows[k]]
    divided += [v for v, of in part.takes if of is not None]
    if any(v in needs.whole for v in (*touched.values(), *touched, *divided)):
        return part.needs, {}
    return needs, touched


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
    leaves, variables_ = traced.input_starts[-1], call.binding.variables
    together = [traced.inputs_of(i) for i in range(len(variables_))]
    return State(
        names=traced.input_names[:leaves],
        inputs={k: v for k, v in zip(order, jaxpr.invars, strict=True) if k < leaves},
        outputs=dict(zip(traced.old_inputs, jaxpr.outvars, strict=False)),
        types=[
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in jax.tree.leaves(read_raw(variables_))
        ],
        together=[of for of in together if of],
        followers=frozenset(
            k
            for variable, of in zip(variables_, together, strict=True)
            if isinstance(variable, nnx.OptState)
            for k in of
        ),
    )


def _is_inlined(eqn: Any) -> bool:
    """True for a call: a server may need only some results or rows of it."""
    return name(eqn) in INLINED and called_body(eqn) is not None
