"""The state of all models that steps have reached: what each server stores, and what the user writes."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
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
from distribute_jax.servers._divide import Placement
from distribute_jax.servers._halves_cache import BoundHalves, places
from distribute_jax.servers._rows import Rows, joined
from distribute_jax.servers._updates import Key, Log
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
        return any(half.writes for half in self.bound.halves.servers)

    @functools.cached_property
    def worker(self) -> WorkerProgram:
        halves = self.bound.halves
        takes = [half.takes for half in halves.servers] if self.writes else []
        return WorkerProgram(self.name, halves.worker, takes, halves.results_at, halves.lookups)


class State:
    """Which servers store which arrays, and what the variables of the models held at the last ``join``."""

    def __init__(
        self, stores: Sequence[Any], device: jax.Device, log: Log, wait_for: Any, can_be_lost: bool
    ) -> None:
        """``wait_for`` waits for answers of servers in other processes, which ``can_be_lost``."""
        self._stores, self._device, self._log, self._wait_for = stores, device, log, wait_for
        self._keys: dict[tuple[int, int], Key] = {}
        """By the id of a variable and the number of its leaf."""
        self._numbers = itertools.count()
        self.variables: dict[int, nnx.Variable[Any]] = {}
        """By id; kept until what the servers have is written back."""
        self._placement: dict[Key, Mapping[int, Rows | None]] = {}
        """The servers that store an array, and which rows of it; None for all."""
        self._used: set[Key] = set()
        """The arrays that updates read or write; all steps must agree on their servers."""
        self._changing: set[Key] = set()
        """The arrays that updates write."""
        self.seen: dict[Key, Any] = {}
        """What the variables held when they and the servers were last equal."""
        self._programs: dict[int, Program] = {}
        self._reads: dict[Program, tuple[list[list[Any]], ...]] = {}
        """What each program reads of which server; until arrays move."""
        self.saved_version = 0 if can_be_lost else None
        """The version of the snapshot that the servers go back to; None if they never do."""
        self._saved: dict[Key, Any] = {}
        self.recorder: Any = None
        """Observes updates and writes, for ``dj.testing.record``."""

    def program(self, bound: BoundHalves) -> Program:
        if id(bound) not in self._programs:
            self._programs[id(bound)] = self._load(bound)
        return self._programs[id(bound)]

    def known(self, binding: Binding) -> Placement:
        keys = [self._keys.get((id(variable), leaf)) for variable, leaf in places(binding)]
        return {k: self._placement[key] for k, key in enumerate(keys) if key in self._used}

    @interrupts_held_back()
    def _load(self, bound: BoundHalves) -> Program:
        placement = bound.halves.placement
        at = [(id(variable), leaf) for variable, leaf in places(bound.binding)]
        numbered = {place: next(self._numbers) for place in at if place not in self._keys}
        numbered = self._keys | numbered
        keys = tuple(numbered[place] for place in at)
        self._settle(bound, keys)
        self._keys = numbered
        self.variables.update({id(variable): variable for variable, _ in places(bound.binding)})
        program = Program(f"{bound.step} {next(self._numbers)}", bound, keys)
        self.load(program)
        for k, key in enumerate(keys):
            in_turn: Mapping[int, Rows | None] = {k % len(self._stores): None}
            self._placement.setdefault(key, placement[k] if any(placement[k].values()) else in_turn)
        return program

    def load(self, program: Program) -> None:
        for store, half in zip(self._stores, program.bound.halves.servers, strict=True):
            reads, writes = ([program.keys[k] for k in at] for at in (half.reads, half.writes))
            store.load(program.name, reads, writes, half.apply)

    def on(self, make: Callable[[], Any]) -> tuple[State, list[Any]]:
        """Returns a copy on new servers that have no arrays yet, and these servers."""
        state, stores = copy.copy(self), [make() for _ in self._stores]
        state._stores, state.seen, state.saved_version, state.recorder = stores, {}, None, None
        return state, stores

    def changing(self) -> dict[Key, Any]:
        return self.pull(self._changing)

    def name(self, key: Key) -> str:
        programs = [program for program in self._programs.values() if key in program.keys]
        return programs[0].bound.halves.names[programs[0].keys.index(key)] if programs else ""

    def _settle(self, bound: BoundHalves, keys: Sequence[Key]) -> None:
        """Moves what only workers used; refuses a step that needs what others change on other servers."""
        halves, placement = bound.halves, {}
        changing = self._changing | {keys[k] for half in halves.servers for k in half.writes}
        conflicts, moved = [], []
        for k in sorted({k for half in halves.servers for k in (*half.reads, *half.writes)}):
            key, new = keys[k], halves.placement[k]
            placement[key] = new
            if self._placement.get(key, new) != new:
                moved.append(key)
                if key in changing & self._used:
                    conflicts.append(halves.names[k])
        if conflicts:
            raise UnsupportedError(_OTHER_SERVERS.format(step=bound.step, lines=listed(conflicts)))
        values = self.pull([key for key in moved if key in self.seen])
        self._changing = changing
        self._used |= placement.keys()
        self._reads.clear()
        for key, value in values.items():
            for server in self._placement[key].keys() - placement[key]:
                self._stores[server].forget([key])
            self._assign(key, value, placement[key])
        self._placement |= placement

    def written(self, leaves: Iterable[tuple[Key, Any]]) -> dict[Key, Any]:
        """Returns those leaves of variables that the servers do not have."""
        return {key: leaf for key, leaf in leaves if self.seen.get(key) is not leaf}

    def knows(self, values: dict[Key, Any]) -> bool:
        """Returns True if some of these arrays are on the servers already."""
        return not self.seen.keys().isdisjoint(values)

    def send(self, values: dict[Key, Any]) -> None:
        """Sets arrays on the servers; if these have some already, while no update is under way."""
        if self.knows(values):  # runs before must not be repeated with what comes after them
            self.save()
        with interrupts_held_back():
            self._save(values, self.saved_version or 0)
            if self.recorder is not None:
                self.recorder.note_write(self._log.version, values)
            for key, value in values.items():
                self._assign(key, jax.device_put(value, self._device), self._placement[key])
                self.seen[key] = value

    def _assign(self, key: Key, value: Any, placement: Mapping[int, Rows | None]) -> None:
        for server, rows in placement.items():
            self._stores[server].assign([key], [rows.of(value) if rows else value])

    def _sources(self, key: Key) -> list[int]:
        """Returns the servers that an array is read from."""
        placement = self._placement[key]
        return [server for server, rows in placement.items() if rows] or [next(iter(placement))]

    def prepare(self, program: Program, run: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """Lets servers set aside what a run reads; returns ``places`` and ``rows`` of its ``Order``."""
        if program not in self._reads:
            places, rows, keys = ([list[Any]() for _ in self._stores] for _ in range(3))
            self._reads[program] = places, rows, keys
            for i, k in enumerate(program.bound.halves.pulls):
                for server in self._sources(program.keys[k]):
                    places[server].append(i)
                    keys[server].append(program.keys[k])
                    rows[server].append(self._placement[program.keys[k]][server])
        places, rows, keys = self._reads[program]
        for store, read in zip(self._stores, keys, strict=True):
            if read:
                store.prepare(run, read)
        return places, rows

    def save(self) -> None:
        """Takes a snapshot of the servers, if they can be lost."""
        if self.saved_version is not None:
            version = self._log.version  # updates may be applied while the servers answer
            self._save(self.changing(), version)

    def _save(self, values: Mapping[Key, Any], version: int) -> None:
        if self.saved_version is not None:
            self.saved_version = version
            self._saved.update(values)
            self._log.forget(version)

    def restore(self, epoch: int) -> None:
        for server, store in enumerate(self._stores):
            keys = [key for key in self._saved if server in self._placement.get(key, ())]
            rows = [self._placement[key][server] for key in keys]
            saved = [self._saved[key] for key in keys]
            arrays = [of.of(x) if of else x for of, x in zip(rows, saved, strict=True)]
            store.restore(epoch, self.saved_version or 0, keys, arrays=arrays)

    def write_back(self, only: Collection[int] | None = None) -> None:
        """Updates variables, by default all; what the user wrote is sent if no closure is under way."""
        known, version, at_rest = self.variables, self._log.version, not self._log.open
        chosen = {i: v for i, v in known.items() if only is None or i in only}
        raws = {i: jax.tree.flatten(read_raw([v])[0]) for i, v in chosen.items()}
        leaves = {(i, n): x for i, (raw, _) in raws.items() for n, x in enumerate(raw)}
        # A value that the user has written may have another number of leaves.
        values = {key: leaves[place] for place, key in self._keys.items() if place in leaves}
        written = self.written(values.items())
        if at_rest and self.seen:  # else nothing was scheduled, and servers may not have started
            self.send(written)
            written = {}
        new = self.pull(self._changing & (values.keys() - written.keys()))
        leaves |= {place: new[key] for place, key in self._keys.items() if key in new}
        with interrupts_held_back():
            for i, (raw, tree) in raws.items():
                now = [leaves[i, n] for n in range(len(raw))]
                if any(map(operator.is_not, now, raw)):
                    write_raw([known[i]], [jax.tree.unflatten(tree, now)])
            self.seen.update(new)
            if only is None and not written:
                self._save(new, version)
            if at_rest and only is None:  # else closures may run again
                self._forget_dead()

    def pull(self, keys: Collection[Key]) -> dict[Key, Any]:
        parts: dict[Key, list[Any]] = {key: [] for key in keys}
        requests = [[k for k in keys if n in self._sources(k)] for n in range(len(self._stores))]
        answers = [store.pull(of) for store, of in zip(self._stores, requests, strict=True)]
        for requested, values in zip(requests, self._wait_for(answers), strict=True):
            for key, value in zip(requested, values, strict=True):
                parts[key].append(value)
        return {key: joined(values) for key, values in parts.items()}

    def _forget_dead(self) -> None:
        """Drops the steps of deleted models, and the state that only they have reached."""
        dead = [i for i, of in self._programs.items() if not of.bound.binding.alive]
        if not dead:
            return
        names = [self._programs.pop(i).name for i in dead]
        self._reads.clear()
        live = {key for program in self._programs.values() for key in program.keys}
        self._keys = {place: key for place, key in self._keys.items() if key in live}
        ids = {number for number, _ in self._keys}
        self.variables = {i: v for i, v in self.variables.items() if i in ids}
        self._changing &= live
        self._used &= live
        for store in self._stores:
            store.forget([*self._placement.keys() - live], names)
        for by_key in (self._placement, self.seen, self._saved):
            for key in by_key.keys() - live:
                del by_key[key]


_OTHER_SERVERS = """\
{step} needs these variables on other servers than an earlier scheduled step, which changes them:
{lines}
Schedule this step first, or use ParameterServerStrategy(servers=1)."""
