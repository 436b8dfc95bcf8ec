"""Checks that all processes of a job run the same step with the same host values and state.

Programs that differ would hang, or run to the end with different numbers: XLA compares nothing. So a step is
compared as a whole before its first run. What may change from one call to the next is logged, and the logs
are compared in the background: which program runs, the host values that are passed, and what the user has
written into variables since the last step.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from distribute_jax._errors import ProcessesDifferError
from distribute_jax._jax_private import read_raw, write_raw
from distribute_jax._mesh import mirrored_sharding, put
from distribute_jax._messages import is_key
from distribute_jax._supervision import xla_flags
from distribute_jax._user_frames import warn_user
from distribute_jax._values import ArrayNotes, PerReplica
from distribute_jax.processes import Job, is_chief, job_of
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._program import Program

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MOST_BYTES = 1 << 20


def check_same_program(step: str, program: Program, arguments: Arguments, mesh: Mesh) -> str:
    """Returns the fingerprint of a program; raises on every process where they are to run different steps.

    Host values of up to 1 MiB among the arguments are compared too. A process that is alone has no
    fingerprint.
    """
    job = job_of(mesh)
    if job.is_alone:
        return ""
    text = _text_of(program)
    facts: list[dict[str, str]] = [
        json.loads(answer)
        for answer in job.exchange(
            "the next step to compile", json.dumps(_facts(step, text, arguments))
        )
    ]
    lines = [line for key in facts[0] for line in _differences(key, [one[key] for one in facts])]
    if not lines:
        return facts[0]["program"]
    if any("program" in line for line in lines):
        lines += _first_difference(job, text)
    raise ProcessesDifferError(
        "The processes are about to run different steps together:\n" + "\n".join(lines[:12]) + "\n"
        "Every process runs the same program on batches of the same shapes. Look for what depends on the "
        "process: its arguments, its data, a seed, the time, the order of a set."
    )


def _facts(step: str, text: str, arguments: Arguments) -> dict[str, str]:
    # What goes whole to each replica has to be equal.
    whole = [v for v in arguments.data if not isinstance(v, PerReplica) and not is_key(v)]
    whole = [v for v in whole if _is_whole(v)]
    small = (host for host in map(_on_host, whole) if host.nbytes <= _MOST_BYTES)
    arrays = (v.global_array if isinstance(v, PerReplica) else v for v in arguments.data)
    return {
        "step": step,
        "shapes of the data": ", ".join(map(_kind, arrays)),
        "values passed": _digest(small)[:12],
        "XLA_FLAGS": " ".join(sorted(xla_flags(os.environ))),
        "program": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def _text_of(program: Program) -> str:
    jaxpr = program.traced.jaxpr
    constants = _digest(np.asarray(c) for c in jaxpr.consts if not is_key(c))
    return _ADDRESS.sub("", f"{jaxpr}\nconstants {constants[:12]}")


def _kind(array: Any) -> str:
    aval = jax.typeof(array)
    return f"{aval.dtype}{list(aval.shape)}"


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    """Returns this process's copy of a value; a random key as its numbers."""
    local = value.addressable_data(0) if isinstance(value, jax.Array) else value
    return np.asarray(jax.random.key_data(local) if is_key(local) else local)


def _digest(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.tobytes())
    return total.hexdigest()


def _differences(key: str, values: Sequence[str]) -> list[str]:
    if len(set(values)) == 1:
        return []
    others = [i for i, value in enumerate(values) if value != values[0]]
    return [f"  {key}: {values[0]} on process 0, {values[i]} on process {i}" for i in others[:3]]


def _first_difference(job: Job, text: str) -> list[str]:
    """Returns the first line of the program that is not the same on all processes."""
    lines = [one.split("\n") for one in job.exchange("the text of a step", text[:_MOST_BYTES])]
    for number in range(max(map(len, lines))):
        here = [one[number].strip() if number < len(one) else "(ended)" for one in lines]
        if len(set(here)) > 1:
            other = next(i for i, line in enumerate(here) if line != here[0])
            return [
                f"  line {number + 1} of the program, on process 0: {here[0][:160]}",
                f"  line {number + 1} of the program, on process {other}: {here[other][:160]}",
            ]
    return []


_SMALL = 1 << 12
"""Bytes of state that are compared at each write of the user's; more at the first, second, fourth, ..."""

_MOST_NAMED = 8


_left_by_steps = ArrayNotes()
"""What steps have left needs no comparison."""


class Calls:
    """Notes the calls of one step, with the fingerprint of its program."""

    def __init__(self, entry: BoundProgram, fingerprint: str) -> None:
        program, binding = entry.program, entry.binding
        starts = program.traced.input_starts
        self._names = [program.traced.input_names[i] for i in program.order]
        mirrored = [
            not keeps_own_values(binding.variables[i])
            for i in (*program.written, *program.kept)
            for _ in range(starts[i], starts[i + 1])
        ]
        self._compared = [i for i, is_mirrored in enumerate(mirrored) if is_mirrored]
        self._state = len(mirrored)
        self._first_data = len(mirrored) + len(program.arrays)
        avals = [program.traced.jaxpr.in_avals[i] for i in program.order][self._first_data :]
        shapes = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals if aval.ndim)
        self._what = f"runs {entry.step}{f' on {shapes}' if shapes else ''}"
        self._fingerprint = fingerprint
        self._written_large = 0

    def note(
        self, job: Job, left: Sequence[Any], flat: Sequence[Any], data: Sequence[Any], steps: int
    ) -> None:
        """Notes a call before it runs; see ``note_call``."""
        notes = [
            f"{self._names[self._first_data + place]} = {_text(value)}"
            for place, value in enumerate(data)
            if not isinstance(value, (PerReplica, jax.Array))
        ]
        if len(left) != self._state or any(map(operator.is_not, flat, left)):
            notes += self._written(flat)
        times = f" {steps} times" if steps > 1 else ""
        shown = f" with {', '.join(notes[:_MOST_NAMED])}" if notes else ""
        rest = "\n".join(notes[_MOST_NAMED:])
        job.actions.record(f"{self._what}{times}{shown}", f"{self._fingerprint}{rest}".encode())

    def _written(self, flat: Sequence[Any]) -> list[str]:
        """Returns the state that no step has left: the user has written it."""
        new = [i for i in self._compared if flat[i] not in _left_by_steps and _is_whole(flat[i])]
        small = [i for i in new if getattr(flat[i], "nbytes", 0) <= _SMALL]
        if len(small) < len(new):
            self._written_large += 1
            if self._written_large & (self._written_large - 1):
                new = small
        return [f"{self._names[i]} = {_text(flat[i])}, written between steps" for i in new]


def note_call(
    entry: BoundProgram, flat: Sequence[Any], data: Sequence[Any], mesh: Mesh, steps: int = 1
) -> None:
    """Notes a call of a step, before it runs; raises where the processes have diverged before."""
    job = job_of(mesh)
    if entry.calls is not None and not job.is_alone:
        entry.calls.note(job, entry.left, flat, data, steps)


def note_outputs(entry: BoundProgram, results: Sequence[Any], mesh: Mesh) -> None:
    """Remembers what a step has left: its state and its results."""
    if not job_of(mesh).is_alone:
        # A variable may hold a plain number of the user's, which is compared each time.
        arrays = (x for x in (*entry.left, *results) if isinstance(x, jax.Array))
        _left_by_steps.add(arrays)


def _is_whole(value: Any) -> bool:
    """Returns whether every process has the whole of a value, and not a part of it."""
    return not isinstance(value, jax.Array) or value.is_fully_replicated


def _text(value: Any) -> str:
    """Returns a number as it is, and a digest of anything longer."""
    host = _on_host(value)
    if host.size == 1:
        return f"{host.item()!r}"
    part = host if host.nbytes <= _MOST_BYTES else host.reshape(-1)[: _MOST_BYTES // host.itemsize]
    return f"{host.dtype}{list(host.shape)} {_digest([part])[:12]}"


def agree_on_values(step: str, binding: Binding, mesh: Mesh) -> None:
    """Sets mirrored variables to the values of process 0 where they differ, with one warning.

    Two processes that seed differently build arrays that JAX takes for equal. Components that the
    replicas keep for themselves may differ, and what is divided among the replicas was compared before it
    was divided, or has no other copy. It is done each time that objects are bound to a step, since
    every process has to know, without talking, that the others do it too.
    """
    job = job_of(mesh)
    if job.is_alone:
        return
    mirrored = [
        (variable, name, leaves)
        for variable, name in zip(binding.variables, binding.names, strict=True)
        if not keeps_own_values(variable)
        and all(map(_is_whole, leaves := jax.tree.leaves(variable.get_raw_value())))
    ]
    digests = [
        f"{name} {', '.join(map(_kind, leaves))} {_digest(map(_on_host, leaves))}"
        for _, name, leaves in mirrored
    ]
    differing = [mirrored[i] for i in _differing(job, digests, f"the first run of step {step}")]
    if differing:
        _take_over([variable for variable, *_ in differing], mesh)
        if is_chief():
            warn_user(_DIFFER.format(n=len(differing), name=differing[0][1]))


def _differing(job: Job, digests: list[str], place: str) -> list[int]:
    total = hashlib.sha256("".join(digests).encode()).hexdigest()
    if len(set(job.exchange("the first run of a step", total, place=place))) == 1:
        return []
    answers = job.exchange("each initial value", json.dumps(digests))
    of_processes: list[list[str]] = list(map(json.loads, answers))
    _check_same_variables(of_processes)
    of_variables = zip(*of_processes, strict=True)
    return [i for i, of_variable in enumerate(of_variables) if len(set(of_variable)) > 1]


def _check_same_variables(of_processes: list[list[str]]) -> None:
    """Refuses models that differ in more than their values: their arrays could not even be sent."""
    for process, theirs in enumerate(of_processes):
        for first, other in itertools.zip_longest(of_processes[0], theirs, fillvalue="nothing "):
            if first.rpartition(" ")[0] != other.rpartition(" ")[0]:
                raise ProcessesDifferError(
                    "The processes of the job run a step with different variables:\n"
                    f"  {first.rpartition(' ')[0]} on process 0\n"
                    f"  {other.rpartition(' ')[0]} on process {process}\n"
                    "Build the same model and optimizer in every process."
                )


def _take_over(variables: list[nnx.Variable[Any]], mesh: Mesh) -> None:
    to = mirrored_sharding(mesh)

    def take(leaf: Any) -> Any:
        value = jnp.asarray(np.asarray(multihost_utils.broadcast_one_to_all(_on_host(leaf))))
        if is_key(leaf):
            return put(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)), to)
        return put(value, to)

    raws = read_raw(variables)
    write_raw(variables, [jax.tree.map(take, raw) for raw in raws])


_DIFFER = """\
{n} variables did not have the same values on all processes, the first of them {name}. They now have \
those of process 0. Give every process the same seed, for example nnx.Rngs(0)."""
