"""Asynchronous training that is done again on one device, update by update, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from distribute_jax.program._part import as_numbers
from distribute_jax.servers._coordinator import Recording
from distribute_jax.servers._log import Attempt
from distribute_jax.servers._state import Program, State
from distribute_jax.servers._store import Store
from distribute_jax.servers._worker import Order, run


def run_again(recording: Recording, state: State, device: jax.Device) -> Iterator[str]:
    """Does the updates of a recording one after the other, on one device; yields what has other bits."""
    again = _Again(recording, state, device)
    for n, (_, closure, results) in enumerate(recording.updates):
        again.set_aside(n)
        if any(map(_differ, again.results(n), results)):
            yield f"the results of update {recording.first + n}, a run of {closure.program.bound.step}"
    again.set_aside(len(recording.updates))
    for key, array in again.state.changing().items():
        if key in recording.last and _differ(recording.last[key], array):
            yield state.name(key)


class _Again:
    """Servers that apply the updates of a recording once more.

    Each is computed from the version of the state that it was computed from before, so the servers set aside
    what its runs read as soon as they have that version.
    """

    def __init__(self, recording: Recording, state: State, device: jax.Device) -> None:
        self._recording, self._devices = recording, (device, device)
        self._stores = [Store() for _ in range(state.servers)]
        self.state = state.on(self._stores)
        self._readers: dict[int, list[tuple[Attempt, Program]]] = {}
        self._orders: dict[int, Order] = {}
        for update, closure, _ in recording.updates:
            self.state.load(closure.program)
            for attempt in update.attempts:
                readers = self._readers.setdefault(attempt.pulled - recording.first, [])
                readers.append((attempt, closure.program))

    def set_aside(self, version: int) -> None:
        """Writes what the user wrote at a version, and keeps what is read of it."""
        for values in self._recording.written.get(self._recording.first + version, []):
            self.state.send(values, version)
        for attempt, program in self._readers.get(version, []):
            read = self.state.prepare(program, attempt.number)
            self._orders[attempt.number] = Order(0, attempt.number, *read)

    def results(self, n: int) -> list[Any]:
        """Does an update, and returns the results of its closure."""
        update, closure, _ = self._recording.updates[n]
        half, shares = closure.program.worker, []
        for run_ in update.attempts:
            order, data = self._orders.pop(run_.number), closure.data_of(run_.worker, run_.share)
            shares.append(run(half, order, data, self._stores, self._devices))
        for store in self._stores:
            store.commit(0, n, [attempt.number for attempt in update.attempts], 0)
        return closure.program.bound.halves.finish(shares)


def _differ(one: Any, other: Any) -> bool:
    one, other = (np.asarray(as_numbers(x)) for x in (one, other))
    return bool(one.dtype != other.dtype or one.tobytes() != other.tobytes())
