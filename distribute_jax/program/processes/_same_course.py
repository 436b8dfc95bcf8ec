"""What the processes of a job have to do alike at every step, written down for them to compare.

A step is compared as a whole before its first run (``_same_program``). What may change from one call to the
next goes into the course of the process: which program runs, the host values that are passed, and what the
user has written into variables since the last step.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._mesh import is_local
from distribute_jax._tree import is_key
from distribute_jax._values import PerReplica
from distribute_jax.processes import Job, job
from distribute_jax.program._entry import Entry
from distribute_jax.program.binding._aggregation import keeps_own_values

_SMALL = 1 << 12
"""Bytes of state that are compared at each write of the user's; more at the first, second, fourth, ..."""

_HOST = 1 << 20
"""Bytes of a host value that are compared."""

_MOST_NAMED = 8


class Made:
    """The arrays that steps have left, which need no comparison: known as long as they live."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self._enough = 1024

    def add(self, arrays: Sequence[Any]) -> None:
        """Adds what a step has left."""
        for array in arrays:
            # A variable may hold a plain number of the user's, which is compared each time.
            if isinstance(array, jax.Array):
                self._arrays[id(array)] = weakref.ref(array)
        if len(self._arrays) > self._enough:
            self._arrays = {i: ref for i, ref in self._arrays.items() if ref() is not None}
            self._enough = max(1024, 2 * len(self._arrays))

    def __contains__(self, array: Any) -> bool:
        """Tells whether a step has left it."""
        ref = self._arrays.get(id(array))
        return ref is not None and ref() is array


_made = Made()


class Calls:
    """The calls of one step, as they are noted.

    Args:
        entry: the step.
        fingerprint: of its program.
    """

    def __init__(self, entry: Entry, fingerprint: str) -> None:
        program, binding = entry.program, entry.binding
        starts = program.traced.input_starts
        self._names = [program.traced.input_names[i] for i in program.order]
        own = [
            keeps_own_values(binding.variables[i])
            for i in (*program.written, *program.kept)
            for _ in range(starts[i], starts[i + 1])
        ]
        self._compared = [i for i, is_own in enumerate(own) if not is_own]
        self._state = len(own)
        self._first_data = len(own) + len(program.arrays)
        self._what = f"runs {entry.step}"
        self._fingerprint = fingerprint
        self._written_large = 0

    def note(
        self, found: Job, left: Sequence[Any], flat: Sequence[Any], data: Sequence[Any], steps: int
    ) -> None:
        """Notes a call before it runs; see ``note_call``."""
        said = [
            f"{self._names[self._first_data + place]} = {_text(value)}"
            for place, value in enumerate(data)
            if not isinstance(value, (PerReplica, jax.Array))
        ]
        if len(left) != self._state or any(map(operator.is_not, flat, left)):
            said += self._written(flat)
        times = f" {steps} times" if steps > 1 else ""
        shown = f" with {', '.join(said[:_MOST_NAMED])}" if said else ""
        rest = "\n".join(said[_MOST_NAMED:])
        found.course.note(f"{self._what}{times}{shown}", f"{self._fingerprint}{rest}".encode())

    def _written(self, flat: Sequence[Any]) -> list[str]:
        """Gives the state that no step has left: the user has written it."""
        new = [i for i in self._compared if flat[i] not in _made and _is_whole(flat[i])]
        small = [i for i in new if getattr(flat[i], "nbytes", 0) <= _SMALL]
        if len(small) < len(new):
            self._written_large += 1
            if self._written_large & (self._written_large - 1):
                new = small
        return [f"{self._names[i]} = {_text(flat[i])}, written between steps" for i in new]


def note_call(
    entry: Entry, flat: Sequence[Any], data: Sequence[Any], mesh: Mesh, steps: int = 1
) -> None:
    """Notes a call of a step, before it runs.

    Args:
        entry: the step.
        flat: its inputs; the state stands first.
        data: its arguments: arrays, numbers and per-replica values.
        mesh: the strategy's.
        steps: how many steps the call runs.

    Raises:
        ProcessesDifferError: the processes have parted before.
    """
    found = job()
    if found is not None and entry.calls is not None and not is_local(mesh):
        entry.calls.note(found, entry.left, flat, data, steps)


def note_made(entry: Entry, results: Sequence[Any], mesh: Mesh) -> None:
    """Remembers what a step has left: its state and its results."""
    if job() is not None and not is_local(mesh):
        _made.add([*entry.left, *results])


def _is_whole(value: Any) -> bool:
    """Tells whether every process has the whole of a value, and not a part of it."""
    return not isinstance(value, jax.Array) or value.is_fully_replicated


def _text(value: Any) -> str:
    """Gives a number as it is, and a digest of anything longer."""
    if isinstance(value, jax.Array):
        value = value.addressable_data(0)
        value = jax.random.key_data(value) if is_key(value) else value
    host = np.asarray(value)
    if host.size == 1:
        return f"{host.item()!r}"
    part = host if host.nbytes <= _HOST else host.reshape(-1)[: _HOST // host.itemsize]
    digest = hashlib.blake2b(np.ascontiguousarray(part).tobytes(), digest_size=6).hexdigest()
    return f"{host.dtype}{list(host.shape)} {digest}"
