"""Divides the state and the update of a step among parameter servers: what each stores, reads and computes.

The update is the part of a step's program that is equal on all replicas. Each server computes its new state
from the newest one. Values that two servers need and that depend on gradients alone, such as their global
norm, are computed once, by a worker.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from distribute_jax._errors import LoweringError, log_once
from distribute_jax.program._jaxprs import (
    equations_before,
    has_effects,
    inputs_of,
    is_literal,
    line,
    narrowed,
    open_jaxpr,
    outputs_of,
    variables,
)
from distribute_jax.program._replication import MIRRORED, Mark, ReplicationWalk
from distribute_jax.program._sharded_update import is_bound_to_replicas, is_plain_cond
from distribute_jax.program._walk import Marked
from distribute_jax.servers._rows import Needs, Rows, Selected

SMALL = 16
"""State of at most this many elements, such as a step count, is stored on every server that reads it."""

_READS_OTHER_SERVER = """\
The update of {name} on server {server} reads {foreign} at {where}, which is stored on server {owner}.
A server updates its variables from what it stores and what a worker sends. Schedule this step before others \
that change these variables, so that they are stored on one server, or use \
ParameterServerStrategy(servers=1)."""

_READS_NEW_VALUE = """\
The step uses the new value of {name} at {where}.
Parameter servers compute new values after the worker has finished the step, from their newest state. Use it \
in the next step, or in a separate function: coordinator.schedule(evaluate, args=(batch,))."""

_COLLECTIVE_IN_COND = """\
The collective under the condition at {where} cannot be divided among workers and servers. Move it out of \
the condition."""

_RETURNS_NEW_VALUE = """\
{result} is computed from the new value of {name} at {where}.
Parameter servers compute new values after the worker has finished the step and returned its results. Return \
it from a separate function, scheduled after this one."""


_STORED_TOGETHER = """\
Parameter servers store %s and %d more variables on one server, since their updates read each other's state, \
as when updates are clipped by their norm."""
_NOT_DIVIDED = "Parameter servers do not divide %s: %s."

Placement = Mapping[int, Mapping[int, Rows | None]]
"""For each leaf of state, by number, the servers that store it, and which rows; None for all rows."""

Parts = Callable[[str, Any], list[Rows]]
"""Returns the rows of each part of a variable, by its name and type."""


class ServerPart(NamedTuple):
    """The update of one server; state is named by its number."""

    writes: tuple[int, ...]
    """The leaves that it updates."""
    reads: tuple[int, ...]
    """The leaves that its update reads."""
    takes: tuple[Selected, ...]
    """The variables of the jaxpr that a worker sends, and which rows of them; None for all."""
    needs: Needs
    """The equations of its update, and which rows they read and compute."""


class Division(NamedTuple):
    """A step divided between a worker and servers."""

    owners: tuple[Mapping[int, Rows | None], ...]
    """For each leaf of state, the servers that store it, and which rows; None for all rows."""
    servers: Sequence[ServerPart]
    eqns: Sequence[Any]
    """The worker's equations."""
    pulls: tuple[int, ...]
    """The leaves that the worker reads."""
    addends: Sequence[Any]
    """The worker's outputs that ``finish`` reads, summed over workers."""
    finish: Sequence[Any]
    """The equations that compute mirrored results from sums over workers."""


class State(NamedTuple):
    """The state among the inputs and outputs of a program, by number of the leaf."""

    names: Sequence[str]
    inputs: dict[int, Any]
    """The variable of the jaxpr, for state that the step reads."""
    outputs: dict[int, Any]
    """The atom of the new value."""
    types: Sequence[Any]
    together: Sequence[Sequence[int]]
    """The leaves of each variable, in the order in which variables are assigned to servers."""
    followers: frozenset[int]
    """Optimizer state, which is stored with its weight."""


class Update:
    """The equations of a step, classified by their dependencies on state, data and sums."""

    def __init__(self, jaxpr: Any, marks: Sequence[Mark], state: State, replicas: int) -> None:
        """Classifies the equations of a worker's program, by the marks of its inputs."""
        self.jaxpr, self.state = jaxpr, state
        self._marks = dict.fromkeys(jaxpr.constvars, MIRRORED)
        self._marks.update(zip(jaxpr.invars, marks, strict=True))
        marked = list(ReplicationWalk(replicas).equations(jaxpr, self._marks))
        self.first = self._equations_of_replica(marked)
        self._number = {v: k for k, v in state.inputs.items()}
        self._from_state = set(self._number)
        self._from_data = {v for v in jaxpr.invars if v not in self._number}
        self.summed = outputs_of(filter(_is_sum, jaxpr.eqns)) if replicas > 1 else set()
        self._from_sums = set(self.summed)
        self._on_servers: set[int] = set()
        self._narrow: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._whole_cond_id: dict[int, int] = {}
        self._rows: dict[int, dict[int, Rows]] = {}
        self._by_rows: set[int] = set()
        self._effects = [eqn for eqn in jaxpr.eqns if has_effects(eqn)]
        self.read_by_effects = variables(inputs_of(self._effects))
        for eqn in jaxpr.eqns:
            reads = variables(eqn.invars)
            if any(v in self._from_sums for v in reads):
                self._from_sums.update(eqn.outvars)
            if any(map(self.differs, eqn.outvars)):
                continue
            if any(self.differs(v) or v in self._from_data for v in reads):
                self._from_data.update(eqn.outvars)
            if any(v in self._from_state for v in reads):
                self._from_state.update(eqn.outvars)
            if not is_bound_to_replicas(eqn) and not any(map(self.differs, reads)):
                self._on_servers.add(id(eqn))
        new = (self._from_state & self._from_data) - self._number.keys()
        self.updated = {v: k for k, v in state.outputs.items() if not is_literal(v) and v in new}
        """New values that depend on old values and on data."""

    def _equations_of_replica(self, marked: Sequence[Marked]) -> set[int]:
        """Returns the ids of the equations that a worker must run, from all with their marks."""
        needed, ids = set[Any](), set[int]()
        for eqn, operands, results in reversed(marked):
            runs = any(results) or not needed.isdisjoint(eqn.outvars)
            if not (runs or any(operands) or is_bound_to_replicas(eqn)):
                continue
            if not runs and is_plain_cond(eqn) and not operands[0]:
                raise LoweringError(_COLLECTIVE_IN_COND.format(where=line(eqn)))
            if runs or not _is_sum(eqn):
                ids.add(id(eqn))
            needed.update(variables(eqn.invars))
        return ids

    def differs(self, v: Any) -> bool:
        """True if a value differs between workers."""
        return bool(self._marks[v])

    def check_not_used_again(self, results: Mapping[str, Any]) -> None:
        """Refuses a step in which a worker would read new state."""
        first = [eqn for eqn in self.jaxpr.eqns if id(eqn) in self.first]
        self._refuse_new(_uses(first), _READS_NEW_VALUE)
        for result, atom in results.items():
            pairs = ((eqn, v) for eqn in self.jaxpr.eqns for v in eqn.outvars if v is atom)
            uses = [(eqn, v) for eqn, v in pairs if v in self.updated]
            self._refuse_new(uses or _uses(self.slice([atom])), _RETURNS_NEW_VALUE, result)

    def _refuse_new(self, uses: Iterable[tuple[Any, Any]], text: str, result: str = "") -> None:
        numbers = [(self.updated[v], eqn) for eqn, v in uses if v in self.updated]
        if numbers:  # name a weight rather than the optimizer state that it is computed from
            k, eqn = min(numbers, key=lambda use: use[0] in self.state.followers)
            name = self.state.names[k]
            raise LoweringError(text.format(result=result, name=name, where=line(eqn)))

    def slice(
        self, atoms: Iterable[Any], includes: Callable[[Any], bool] = lambda _: True
    ) -> list[Any]:
        """Returns the equations that some values depend on, among those that ``includes`` selects."""

        def part_of(eqn: Any, needed: set[Any]) -> Any:
            return self._narrowed(eqn, needed) if includes(eqn) else None

        return equations_before(self.jaxpr.eqns, atoms, part_of)

    def _narrowed(self, eqn: Any, needed: set[Any]) -> Any:
        """Returns a condition without results that are not needed."""
        outs = tuple(i for i, v in enumerate(eqn.outvars) if v in needed)
        if not is_plain_cond(eqn) or len(outs) == len(eqn.outvars):
            return eqn
        if (id(eqn), outs) not in self._narrow:
            self._narrow[id(eqn), outs] = narrow = narrowed(eqn, outs)
            self._whole_cond_id[id(narrow)] = id(eqn)
        return self._narrow[id(eqn), outs]

    def _id(self, eqn: Any) -> int:
        return self._whole_cond_id.get(id(eqn), id(eqn))

    def _needs(self, atoms: Iterable[Any], eqns: Sequence[Any]) -> list[Any]:
        """Returns the inputs of equations that compute some values."""
        computed = outputs_of(eqns)
        return [v for v in variables([*inputs_of(eqns), *atoms]) if v not in computed]

    def divide(
        self, servers: int, results: Sequence[Any], known: Placement, parts: Parts
    ) -> Division:
        """Divides the state and its update among servers.

        The servers of some state are ``known``; other variables may be divided into ``parts``.
        """
        groups, names = self._groups(), self.state.names
        weights = [k for k in self.updated.values() if k not in self.state.followers]
        if servers > 1 and len(weights) > 2 and len({groups[k] for k in weights}) == 1:
            name = names[weights[0]]
            log_once(_STORED_TOGETHER, name, len(weights) - 1, about=name)
        owners = self._owners(servers, groups, known)
        self._divide_variables(servers, owners, groups, known, parts)
        stored = [
            {k for k, owner in owners.items() if s in known.get(k, self._rows.get(k, (owner,)))}
            for s in range(servers)
        ]
        for s in range(servers):
            self._store_copies(s, stored, owners)
        # Small optimizer state that no update reads.
        stored[0].update(set(range(len(names))).difference(*stored))
        self._store_copies(0, stored, owners)
        by_worker = self._equations_of_worker(stored, results)
        of_servers = [self._part(s, of, by_worker) for s, of in enumerate(stored)]
        finish = self.slice(results, self.after_sums)
        addends = self._needs(results, finish)
        sent = [*(v for part in of_servers for v, _ in part.takes), *addends]
        needed = self.slice([*sent, *self.read_by_effects])
        kept = {self._id(eqn): eqn for eqn in (*needed, *self._effects)}
        eqns = [kept[id(eqn)] for eqn in self.jaxpr.eqns if id(eqn) in kept]
        placed = tuple(
            {s: self._rows.get(k, {}).get(s) for s, of in enumerate(stored) if k in of}
            for k in range(len(names))
        )
        pulls = tuple(sorted(self._numbers(self._needs(sent, eqns))))
        return Division(placed, of_servers, eqns, pulls, addends, finish)

    def _numbers(self, values: Iterable[Any]) -> set[int]:
        """Returns the numbers of those values that are state."""
        return {self._number[v] for v in values if v in self._number}

    def after_sums(self, eqn: Any) -> bool:
        """True if an equation depends on a sum over workers."""
        return any(v in self._from_sums and v not in self.summed for v in eqn.outvars)

    # Where state is stored

    def _owners(self, servers: int, group: Sequence[int], known: Placement) -> dict[int, int]:
        """Returns the server of each leaf, except small optimizer state, which is stored where it is read."""
        followers = self.state.followers
        heads = [leaves[0] for leaves in self.state.together]
        place = {group[k]: min(known[k]) for k in sorted(known, reverse=True)}
        for k in sorted(heads, key=lambda k: k in followers):
            if k not in followers or (self._is_large(k) and group[k] in followers):
                place.setdefault(group[k], len(place) % servers)
        owners = {k: place[head] for k, head in enumerate(group) if head in place}
        return owners | {k: min(known[k]) for k in owners if k in known}

    def _is_large(self, k: int) -> bool:
        return bool(prod(self.state.types[k].shape) > SMALL)

    def _divide_variables(
        self,
        servers: int,
        owners: Mapping[int, int],
        groups: Sequence[int],
        known: Placement,
        parts: Parts,
    ) -> None:
        """Chooses the servers of rows of variables; optimizer state is divided like its variable."""
        names, types = self.state.names, self.state.types
        fixed = {groups[k]: known[k] for k in known if self._is_large(k)}
        for head in sorted({groups[k] for k in owners} - self.state.followers):
            if head not in fixed and len(rows := parts(names[head], types[head])) > 1:
                of_parts = sorted((owners[head] + i) % servers for i in range(len(rows)))
                fixed[head] = dict(zip(of_parts, rows, strict=True))
            place = {s: rows for s, rows in fixed.get(head, {}).items() if rows}
            if place and self._is_large(head):
                members = [k for k in owners if groups[k] == head and self._is_large(k)]
                self._rows.update(dict.fromkeys(members, place))
        while reasons := self._needed_whole():
            together = {groups[k] for k in reasons}
            self._rows = {k: of for k, of in self._rows.items() if groups[k] not in together}
            for k, why in reasons.items():
                log_once(_NOT_DIVIDED, names[groups[k]], why, about=names[groups[k]])

    def _needed_whole(self) -> dict[int, str]:
        """Returns the divided state that an update needs whole, with reasons."""
        outputs, types = self.state.outputs, self.state.types
        rows = {outputs[k]: next(iter(of.values())) for k, of in self._rows.items() if k in outputs}
        whole = [v for k, v in outputs.items() if k not in self._rows]
        needs = Needs(self.slice(outputs.values(), self._of_state), rows, whole)
        self._by_rows = {self._id(eqn) for eqn in filter(needs.by_rows, needs.eqns)}
        reasons = {}
        for k, of in self._rows.items():
            eqn = needs.whole.get(self.state.inputs.get(k))
            if types[k].shape[0] != max(rows.stop for rows in of.values()):
                reasons[k] = f"{self.state.names[k]}, which is stored with it, has other rows"
            elif eqn is not None:
                reasons[k] = f"its update needs {self.state.names[k]} whole at {line(eqn)}"
        return reasons

    def _groups(self) -> list[int]:
        """Returns for each leaf the head of its group: leaves that are stored together.

        The head is the first leaf that is not optimizer state.
        """
        head = list(range(len(self.state.names)))
        for leaves in (*self.state.together, *([k, *of] for k, of in self._sources().items())):
            joined = {head[k] for k in leaves}
            first = min(joined, key=lambda k: (k in self.state.followers, k))
            head = [first if k in joined else k for k in head]
        return head

    def _sources(self) -> dict[int, set[int]]:
        """Returns the changing state that each update reads, without state that every server can store.

        That is scalars, and small state that depends on no gradient, such as a random key.
        """
        sets = {v: 1 << k for v, k in self._number.items()}
        of_all = _flows(
            self.jaxpr, [sets.get(v, 0) for v in self.jaxpr.invars],
            list(self.state.outputs.values()), self._of_state,
        )  # fmt: skip
        types, new = self.state.types, set(self.updated.values())
        changing = [
            k for k in self.state.outputs if types[k].shape and (k in new or self._is_large(k))
        ]
        return {
            k: {i for i in changing if bits >> i & 1}
            for k, bits in zip(self.state.outputs, of_all, strict=True)
        }

    # What each part computes

    def _store_copies(self, server: int, stored: list[set[int]], owners: dict[int, int]) -> None:
        """Adds copies of small or constant state that the update of a server reads."""
        outputs = self.state.outputs
        while True:
            written = {k: v for k, v in outputs.items() if k in stored[server]}
            eqns = self.slice(written.values(), self._of_state)
            new = self._numbers(self._needs(written.values(), eqns)) - stored[server]
            for k in filter(self._is_large, new & outputs.keys()):
                self._refuse_foreign(k, server, owners[k], written)
            if not new:
                return
            stored[server] |= new

    def _refuse_foreign(
        self, foreign: int, server: int, owner: int, written: dict[int, Any]
    ) -> None:
        names = self.state.names
        for k, atom in written.items():
            for eqn in self.slice([atom], self._of_state):
                if self.state.inputs[foreign] in eqn.invars:
                    facts = {"name": names[k], "foreign": names[foreign], "where": line(eqn)}
                    text = _READS_OTHER_SERVER.format(server=server, owner=owner, **facts)
                    raise LoweringError(text)

    def _of_state(self, eqn: Any) -> bool:
        return id(eqn) in self._on_servers

    def _equations_of_worker(self, stored: Sequence[set[int]], results: Sequence[Any]) -> set[int]:
        """Returns the equations that depend on gradients alone and that the worker runs for all servers."""
        outputs = self.state.outputs
        slices = [
            self.slice(atoms, self._of_state)
            for atoms in (*([v for k, v in outputs.items() if k in of] for of in stored), results)
        ]
        data_alone = self._from_data - self._from_state - self._from_sums
        counts = Counter(
            self._id(eqn)
            for eqns in slices
            for eqn in eqns
            # Each server computes its rows.
            if eqn.outvars[0] in data_alone and self._id(eqn) not in self._by_rows
        )
        always = self.first.union(map(self._id, slices[-1]))
        return {i for i, number in counts.items() if number > 1 or i in always}

    def _part(self, server: int, stored: set[int], by_worker: set[int]) -> ServerPart:
        outputs = {k: v for k, v in self.state.outputs.items() if k in stored}
        atoms = outputs.values()
        eqns = self.slice(atoms, lambda eqn: self._of_state(eqn) and id(eqn) not in by_worker)
        rows = {v: self._rows[k][server] for k, v in outputs.items() if k in self._rows}
        needs = Needs(eqns, rows, [v for k, v in outputs.items() if k not in self._rows])
        needed = self._needs(atoms, eqns)
        others = [v for v in needed if v not in self._number and v not in self.jaxpr.constvars]
        takes = [(v, None if v in needs.whole else needs.rows.get(v)) for v in others]
        reads = sorted(self._numbers(needed))
        return ServerPart(tuple(outputs), tuple(reads), tuple(takes), needs)


def _uses(eqns: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Returns the values that equations read, then those that they compute, with the equation."""
    reads = [(eqn, v) for eqn in eqns for v in variables(eqn.invars)]
    return reads + [(eqn, v) for eqn in eqns for v in eqn.outvars]


def _flows(
    jaxpr: Any,
    inputs: Sequence[int],
    outs: Sequence[Any],
    includes: Callable[[Any], bool] = lambda _: True,
) -> list[int]:
    """Returns the inputs that some values of a program depend on, as bit sets."""
    env = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if is_literal(atom) else env.get(atom, 0)

    for eqn in filter(includes, jaxpr.eqns):
        operands = list(map(read, eqn.invars))
        if not any(operands):
            continue
        bodies = eqn.params["branches"] if eqn.primitive.name == "cond" else ()
        every = functools.reduce(operator.or_, operands[:1] if bodies else operands)
        env.update(dict.fromkeys(eqn.outvars, every))
        for inner in map(open_jaxpr, bodies):
            flows = _flows(inner, operands[1:], inner.outvars)
            env.update((v, env[v] | bits) for v, bits in zip(eqn.outvars, flows, strict=True))
    return list(map(read, outs))


def _is_sum(eqn: Any) -> bool:
    """True if servers can reduce the values of all workers for this equation."""
    return eqn.primitive.name == "psum" and eqn.params.get("axis_index_groups") is None
