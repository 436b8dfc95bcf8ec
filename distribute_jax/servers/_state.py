"""The state of all models that steps have reached: which server has which array, and what the user writes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from distribute_jax._errors import UnsupportedError
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._jax_private import read_raw, write_raw
from distribute_jax._messages import listed
from distribute_jax.program._binding import Binding
from distribute_jax.program._divide import Homes
from distribute_jax.program._halves_cache import BoundHalves, places
from distribute_jax.program._rows import Rows, joined
from distribute_jax.servers._store import Key, ServerProgram, Snapshot, Store
from distribute_jax.servers._worker import WorkerProgram


@dataclass(frozen=True, eq=False)
class Program:
    """The halves of a step, loaded into the servers."""

    name: str
    bound: BoundHalves
    keys: tuple[Key, ...]
    """Of each leaf of state, in the order of the halves."""

    @functools.cached_property
    def writes(self) -> bool:
        """Whether it changes state."""
        return any(half.writes for half in self.bound.halves.servers)

    @functools.cached_property
    def worker(self) -> WorkerProgram:
        """The worker's half."""
        halves = self.bound.halves
        takes = [half.takes for half in halves.servers] if self.writes else []
        return WorkerProgram(self.name, halves.worker, takes, halves.results_at, halves.lookups)


class State:
    """The arrays of all models that the steps of a strategy have reached, and where they are.

    The variables of the models are as of the last ``join``. What the user writes into them goes to the
    servers with the next closure.
    """

    def __init__(
        self,
        stores: Sequence[Any],
        device: jax.Device,
        answers: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        may_go_back: bool = False,
    ) -> None:
        """Starts with none; ``answers`` waits for what was asked of servers that are other processes."""
        self._stores, self._device, self._answers = stores, device, answers
        self._keys: dict[tuple[int, int], Key] = {}
        self._numbers = itertools.count()
        self._variables: dict[int, nnx.Variable[Any]] = {}
        """All variables by their ids; kept until what the servers have is written back."""
        self._homes: dict[Key, Mapping[int, Rows | None]] = {}
        """The servers that store an array, and which rows of it; None for all."""
        self._used: set[Key] = set()
        """The arrays that updates read or write; all steps must agree on their servers."""
        self._changing: set[Key] = set()
        """The arrays that updates write."""
        self._seen: dict[Key, Any] = {}
        """What the variables held when they and the servers were last equal."""
        self._programs: dict[int, Program] = {}
        self._reads: dict[Program, tuple[Any, Any, list[list[Key]]]] = {}
        """What each program reads, where and of which servers; until arrays move."""
        self.saved = Snapshot(0, {}) if may_go_back else None
        """What the servers had at the version that they go back to; None where they never do."""
        self.written_to: Callable[[int, dict[Key, Any]], None] | None = None
        """Told of the version, and of the arrays that are set on the servers then."""

    def program(self, bound: BoundHalves) -> Program:
        """Returns the halves of a step, loaded into the servers."""
        if (program := self._programs.get(id(bound))) is None:
            program = self._programs[id(bound)] = self._load(bound)
        return program

    def known(self, binding: Binding) -> Homes:
        """Returns the servers of the leaves that updates use."""
        keys = [self._keys.get((id(variable), leaf)) for variable, leaf in places(binding)]
        return {k: self._homes[key] for k, key in enumerate(keys) if key in self._used}

    @interrupts_held_back()
    def _load(self, bound: BoundHalves) -> Program:
        halves = bound.halves
        at = [(id(variable), leaf) for variable, leaf in places(bound.binding)]
        new = {place: next(self._numbers) for place in at if place not in self._keys}
        keys = tuple(new[place] if place in new else self._keys[place] for place in at)
        self._settle(bound, keys)
        self._keys.update(new)
        self._variables.update({id(variable): variable for variable, _ in places(bound.binding)})
        program = Program(f"{bound.step} {next(self._numbers)}", bound, keys)
        self.load(program)
        for k, key in enumerate(keys):
            alone: Mapping[int, Rows | None] = {k % len(self._stores): None}
            self._homes.setdefault(key, halves.homes[k] if any(halves.homes[k].values()) else alone)
        return program

    def load(self, program: Program) -> None:
        """Loads the halves of the servers."""
        for store, half in zip(self._stores, program.bound.halves.servers, strict=True):
            reads, writes = (
                tuple(program.keys[k] for k in leaves) for leaves in (half.reads, half.writes)
            )
            store.load(program.name, ServerProgram(reads, writes, half.apply))

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._stores)

    def on(self, stores: Sequence[Store]) -> State:
        """Returns the same arrays on other servers, which have none of them yet."""
        state = copy.copy(self)
        state._stores, state._seen, state.saved, state.written_to = stores, {}, None, None
        return state

    def changing(self) -> dict[Key, Any]:
        """Returns the arrays that updates change."""
        return self.pull(self._changing)

    def name(self, key: Key) -> str:
        """Returns what a step calls an array."""
        programs = [of for of in self._programs.values() if key in of.keys]
        return programs[0].bound.halves.names[programs[0].keys.index(key)] if programs else ""

    @property
    def seen(self) -> dict[Key, Any]:
        """What the variables held when they and the servers were last equal."""
        return dict(self._seen)

    def _settle(self, bound: BoundHalves, keys: Sequence[Key]) -> None:
        """Moves what only workers used, or refuses what earlier steps would change on too few servers."""
        halves, homes = bound.halves, {}
        writes = {keys[k] for half in halves.servers for k in half.writes}
        changing, lines = self._changing | writes, []
        for k in sorted({k for half in halves.servers for k in (*half.reads, *half.writes)}):
            key = keys[k]
            homes[key] = halves.homes[k]
            if key in changing & self._used and self._homes[key] != homes[key]:
                lines.append(halves.names[k])
        if lines:
            raise UnsupportedError(_OTHER_SERVERS.format(step=bound.step, lines=listed(lines)))
        self._changing = changing
        self._used |= homes.keys()
        self._reads.clear()
        for key, there in homes.items():
            if (old := self._homes.get(key, there)) != there and key in self._seen:
                value = self.pull([key])[key]
                for home in old.keys() - there:
                    self._stores[home].forget([key])
                self._assign(key, value, there)
            self._homes[key] = there

    def written(self, program: Program) -> dict[Key, Any]:
        """Returns what the variables of a step hold that the servers do not have."""
        return {
            key: leaf
            for key, leaf in zip(program.keys, program.bound.leaves, strict=True)
            if self._seen.get(key) is not leaf
        }

    def knows(self, values: dict[Key, Any]) -> bool:
        """Returns whether some of these arrays are on the servers already."""
        return not self._seen.keys().isdisjoint(values)

    @interrupts_held_back()
    def send(self, values: dict[Key, Any], version: int) -> None:
        """Sets arrays on the servers, while no update is under way if these have them already."""
        if self.knows(values):  # runs before must not be repeated with what comes after them
            self.save(version)
        if self.saved is not None:
            self.saved = Snapshot(self.saved.version, {**self.saved.state, **values})
        if self.written_to is not None:
            self.written_to(version, values)
        for key, value in values.items():
            self._assign(key, jax.device_put(value, self._device), self._homes[key])
            self._seen[key] = value

    def _assign(self, key: Key, value: Any, homes: Mapping[int, Rows | None]) -> None:
        for home, rows in homes.items():
            self._stores[home].assign({key: rows.of(value) if rows else value})

    def _sources(self, key: Key) -> list[int]:
        """Returns the servers that an array is read from."""
        homes = self._homes[key]
        return [home for home, rows in homes.items() if rows] or [next(iter(homes))]

    def prepare(
        self, program: Program, run: int
    ) -> tuple[list[list[int]], list[list[Rows | None]]]:
        """Lets the servers set aside what a run reads; returns which arrays each has, and rows of them."""
        if program not in self._reads:
            places: list[list[int]] = [[] for _ in self._stores]
            rows: list[list[Rows | None]] = [[] for _ in self._stores]
            keys: list[list[Key]] = [[] for _ in self._stores]
            for i, k in enumerate(program.bound.halves.pulls):
                for home in self._sources(program.keys[k]):
                    places[home].append(i)
                    keys[home].append(program.keys[k])
                    rows[home].append(self._homes[program.keys[k]][home])
            self._reads[program] = places, rows, keys
        places, rows, keys = self._reads[program]
        for store, of_store in zip(self._stores, keys, strict=True):
            if of_store:
                store.prepare(run, of_store)
        return places, rows

    def save(self, version: int) -> None:
        """Keeps what the servers have now, to go back to."""
        if self.saved is not None:
            self.saved = Snapshot(version, {**self.saved.state, **self.changing()})

    def restore(self, epoch: int) -> None:
        """Lets the servers go back to what was kept."""
        version, state = self.saved or Snapshot(0, {})
        theirs: list[dict[Key, Any]] = [{} for _ in self._stores]
        for key in state.keys() & self._homes.keys():
            for home, rows in self._homes[key].items():
                theirs[home][key] = rows.of(state[key]) if rows else state[key]
        for store, values in zip(self._stores, theirs, strict=True):
            store.restore(epoch, Snapshot(version, values))

    @interrupts_held_back()
    def write_back(
        self,
        version: int,
        only: Iterable[nnx.Variable[Any]] | None = None,
        *,
        at_rest: bool = True,
    ) -> None:
        """Lets variables, for None all, hold what the servers have.

        What was written since is sent at rest. While closures are under way it waits for the next one.
        """
        known = self._variables
        chosen = known if only is None else {id(v): v for v in only if id(v) in known}
        held = {i: jax.tree.flatten(read_raw([v])[0]) for i, v in chosen.items()}
        places = {
            self._keys[i, at]: leaf
            for i, (leaves, _) in held.items()
            for at, leaf in enumerate(leaves)
        }
        written = {key: leaf for key, leaf in places.items() if self._seen.get(key) is not leaf}
        if at_rest:
            self.send(written, version)
            written = {}
        new = self.pull(self._changing & (places.keys() - written.keys()))
        for i, (leaves, tree) in held.items():
            values = [new.get(self._keys[i, at], leaf) for at, leaf in enumerate(leaves)]
            if any(value is not leaf for value, leaf in zip(values, leaves, strict=True)):
                write_raw([known[i]], [jax.tree.unflatten(tree, values)])
        self._seen.update(new)
        if self.saved is not None and only is None and not written:
            self.saved = Snapshot(version, {**self.saved.state, **new})
        if at_rest and only is None:  # else closures may run again
            self._forget_dead()

    def pull(self, keys: Collection[Key]) -> dict[Key, Any]:
        """Returns arrays as the servers have them now."""
        values: dict[Key, list[Any]] = {key: [] for key in keys}
        theirs = [
            [key for key in keys if n in self._sources(key)] for n in range(len(self._stores))
        ]
        asked = [store.pull(of) for store, of in zip(self._stores, theirs, strict=True)]
        for of, got in zip(theirs, self._answers(asked), strict=True):
            for key, value in zip(of, got, strict=True):
                values[key].append(value)
        return {key: joined(parts) for key, parts in values.items()}

    def _forget_dead(self) -> None:
        """Drops the steps of deleted models, and the state that only they have reached."""
        dead = [i for i, of in self._programs.items() if not of.bound.binding.alive]
        if not dead:
            return
        names = [self._programs.pop(i).name for i in dead]
        self._reads.clear()
        live = {key for program in self._programs.values() for key in program.keys}
        self._keys = {place: key for place, key in self._keys.items() if key in live}
        of_live = {number for number, _ in self._keys}
        self._variables = {i: v for i, v in self._variables.items() if i in of_live}
        self._changing &= live
        self._used &= live
        for store in self._stores:
            store.forget(self._homes.keys() - live, names)
        for known in (self._homes, self._seen):
            for key in known.keys() - live:
                del known[key]


_OTHER_SERVERS = """\
{step} needs these variables on more servers than a step that was scheduled before, and that changes them:
{lines}
Schedule this step first, or use ParameterServerStrategy(servers=1)."""
