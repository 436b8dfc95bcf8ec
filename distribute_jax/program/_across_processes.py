"""Checks that all processes of a job run the same step with the same host values and state.

Programs that differ would hang or compute different numbers, since XLA compares nothing. So the whole step is
compared before its first run. What may change from call to call is logged, and the logs are compared in the
background: which program runs, the host values that are passed, what the user wrote into variables since the
last step, and, at the first, second, fourth, eighth, … call, the arrays that are passed or captured.
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

from distribute_jax._errors import ProcessesDifferError, warn_user
from distribute_jax._jax_private import UNNOTED, note_all, note_on, read_raw, write_raw
from distribute_jax._mesh import mirrored_sharding, put
from distribute_jax._messages import is_key
from distribute_jax._supervision import xla_flags
from distribute_jax._values import PerReplica
from distribute_jax.processes import Job, is_chief, job_of
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._options import RunOptions
from distribute_jax.program._program import Program

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MAX_COMPARED_BYTES = 1 << 20


def check_same_program(
    step: str, program: Program, arguments: Arguments, binding: Binding, shardings: Sequence[Any],
    options: RunOptions, strategy: Any, mesh: Mesh,
) -> str:  # fmt: skip
    """Returns the fingerprint of a program; raises on all processes if their steps differ.

    The strategies, where state is stored, the options, and values of up to 1 MiB that are passed or captured
    are compared too. In a single process the fingerprint is empty.
    """
    job = job_of(mesh)
    if job.is_alone:
        return ""
    text, values = _text_of(program), _values_of_all(arguments, binding)
    here = _facts(step, text, arguments, values.values(), shardings, options)
    here["strategy"] = type(strategy).__name__
    answers = job.exchange("the next step to compile", json.dumps(here))
    facts: list[dict[str, str]] = [json.loads(answer) for answer in answers]
    differing = {key: _differences(key, [one[key] for one in facts]) for key in facts[0]}
    if not any(differing.values()):
        return facts[0]["program"]
    if differing["program"]:
        differing["program"] += _first_difference(job, text)
    if differing["values passed"]:
        differing["values passed"] = _different_values(job, values)
    lines = [line for of_key in differing.values() for line in of_key]
    raise ProcessesDifferError(
        "The processes are about to run different steps together:\n" + "\n".join(lines[:12]) + "\n"
        "Every process runs the same program on batches of the same shapes. Look for what depends on the "
        "process: its arguments, its data, a seed, the time, the order of a set."
    )


def _facts(
    step: str, text: str, arguments: Arguments, values: Iterable[Any], shardings: Sequence[Any],
    options: RunOptions,
) -> dict[str, str]:  # fmt: skip
    config: Any = jax.config
    return {
        "step": step,
        "options": f"{options}",
        "sharded state": ", ".join(f"{s.spec}" for s in shardings if s) or "none",
        # It changes the bits of random keys, and not the traced program.
        "jax_threefry_partitionable": f"{config.jax_threefry_partitionable}",
        "shapes of the data": ", ".join(map(_kind, arguments.arrays)),
        "values passed": _digest(values)[:12],
        "XLA_FLAGS": " ".join(sorted(xla_flags(os.environ))),
        "program": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def _values_of_all(arguments: Arguments, binding: Binding) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the values that each replica gets, which must be equal on all processes, by name."""
    names = *arguments.names_of("data"), *(name for name, _, _ in binding.arrays)
    named = zip(names, (*arguments.data, *binding.captured_arrays()), strict=True)
    return {
        name: _on_host(value)
        for name, value in named
        if not isinstance(value, PerReplica)
        and getattr(value, "nbytes", 0) <= _MAX_COMPARED_BYTES
        and _is_readable_here(value)
    }


def _text_of(program: Program) -> str:
    jaxpr = program.traced.jaxpr
    constants = _digest(np.asarray(c) for c in jaxpr.consts if not is_key(c))
    return _ADDRESS.sub("", f"{jaxpr}\nconstants {constants[:12]}")


def _kind(array: Any) -> str:
    aval = jax.typeof(array)
    return f"{aval.dtype}{list(aval.shape)}"


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    """Returns this process's copy of a value; for random keys their data."""
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
    return [
        f"  {key}: {values[0]:.400} on process 0, {values[i]:.400} on process {i}"
        for i in others[:3]
    ]


def _first_difference(job: Job, text: str) -> list[str]:
    """Returns the first line of the program that differs between processes."""
    texts = job.exchange("the text of a step", text[:_MAX_COMPARED_BYTES])
    programs = ([line.strip() for line in text.split("\n")] for text in texts)
    for number, lines in enumerate(itertools.zip_longest(*programs, fillvalue="(ended)"), 1):
        for other, line in enumerate(lines):
            if line != lines[0]:
                start = f"  line {number} of the program, on process"
                return [f"{start} 0: {lines[0][:160]}", f"{start} {other}: {line[:160]}"]
    return []


def _different_values(job: Job, values: dict[str, np.ndarray[Any, Any]]) -> list[str]:
    here = json.dumps({name: _text(host) for name, host in values.items()})
    facts = [json.loads(answer) for answer in job.exchange("the values passed", here)]
    names = dict.fromkeys(name for one in facts for name in one)
    return [
        line for name in names for line in _differences(name, [f"{one.get(name)}" for one in facts])
    ]


_MAX_ALWAYS_COMPARED_BYTES = 1 << 12
"""Larger state that the user writes is compared at the first, second, fourth, eighth, … write only."""

_MAX_NAMED = 8

_OUTPUT = "_distribute_jax_output"
"""The note of an array that a step returned, which needs no comparison."""


class CallLog:
    """Logs the calls of one step, with the fingerprint of its program."""

    def __init__(self, entry: BoundProgram, fingerprint: str) -> None:
        program, binding = entry.program, entry.binding
        self._job = job_of(program.mesh)
        self._names = [program.traced.input_names[i] for i in program.order]
        mirrored = [
            not keeps_own_values(binding.variables[i])
            for i in (*program.traced.written, *program.read_only)
            for _ in program.traced.inputs_of(i)
        ]
        self._compared = [i for i, is_mirrored in enumerate(mirrored) if is_mirrored]
        self._num_state_inputs = len(mirrored)
        self._first_data = len(mirrored) + len(program.arrays)
        avals = [program.traced.jaxpr.in_avals[i] for i in program.order][self._first_data :]
        shapes = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals if aval.ndim)
        self._action = f"runs {entry.step}{f' on {shapes}' if shapes else ''}"
        self._fingerprint = fingerprint
        self._large_writes = self._calls = 0

    def record(
        self, last_state: Sequence[Any], flat: Sequence[Any], data: Sequence[Any], steps: int = 1
    ) -> None:
        """Logs a call before it runs; raises if the processes diverged before."""
        notes = [
            f"{self._names[self._first_data + place]} = {_text(value)}"
            for place, value in enumerate(data)
            if not isinstance(value, (PerReplica, jax.Array))
        ]
        unchanged = len(last_state) == self._num_state_inputs
        if not unchanged or any(map(operator.is_not, flat, last_state)):
            notes += self._written_by_user(flat)
        self._calls += 1
        if _is_power_of_two(self._calls):
            notes += self._arrays_passed(flat, data)
        times = f" {steps} times" if steps > 1 else ""
        shown = f" with {', '.join(notes[:_MAX_NAMED])}" if notes else ""
        rest = "\n".join(notes[_MAX_NAMED:])
        self._job.actions.record(
            f"{self._action}{times}{shown}", f"{self._fingerprint}{rest}".encode()
        )

    def _written_by_user(self, flat: Sequence[Any]) -> list[str]:
        """Describes the state that is not the output of a step."""
        new = [
            i
            for i in self._compared
            if note_on(flat[i], _OUTPUT) is UNNOTED and _is_readable_here(flat[i])
        ]
        small = [i for i in new if getattr(flat[i], "nbytes", 0) <= _MAX_ALWAYS_COMPARED_BYTES]
        if len(small) < len(new):
            self._large_writes += 1
            if not _is_power_of_two(self._large_writes):
                new = small
        return [f"{self._names[i]} = {_text(flat[i])}, written between steps" for i in new]

    def _arrays_passed(self, flat: Sequence[Any], data: Sequence[Any]) -> list[str]:
        """Describes the captured arrays and array arguments that are not the output of a step."""
        passed = [
            *range(self._num_state_inputs, self._first_data),
            *(self._first_data + k for k, v in enumerate(data) if isinstance(v, jax.Array)),
        ]
        return [
            f"{self._names[i]} = {_text(flat[i])}"
            for i in passed
            if note_on(flat[i], _OUTPUT) is UNNOTED and _is_readable_here(flat[i])
        ]


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)


def note_outputs(entry: BoundProgram, results: Sequence[Any], mesh: Mesh) -> None:
    """Remembers the new state and the results of a step, which need no comparison."""
    if not job_of(mesh).is_alone:
        # A Python number that the user stored in a variable is compared each time.
        arrays = (x for x in (*entry.last_state, *results) if isinstance(x, jax.Array))
        note_all(arrays, _OUTPUT, True)


def _is_readable_here(value: Any) -> bool:
    """True if this process has all of a value, not only some shards, and it was not donated."""
    return not isinstance(value, jax.Array) or (
        value.is_fully_replicated and not value.is_deleted()
    )


def _text(value: Any) -> str:
    """Returns the text of a number, and a digest of a larger array."""
    host = _on_host(value)
    if host.size == 1:
        return f"{host.item()!r}"
    part = host.reshape(-1)[: _MAX_COMPARED_BYTES // host.itemsize]
    return f"{host.dtype}{list(host.shape)} {_digest([part])[:12]}"


def agree_on_values(step: str, binding: Binding, mesh: Mesh) -> None:
    """Sets mirrored variables to the values of process 0 if they differ, with one warning.

    JAX assumes that arrays of processes that were seeded differently are equal. The replicas' separate
    components may differ, and arrays that are sharded over the replicas were compared before they were
    sharded, or have no other copy. This is done at each binding, since every process must know without
    communication that the others do it too.
    """
    job = job_of(mesh)
    if job.is_alone:
        return
    mirrored = [
        (variable, name, leaves)
        for variable, name in zip(binding.variables, binding.names, strict=True)
        if not keeps_own_values(variable)
        and all(map(_is_readable_here, leaves := jax.tree.leaves(variable.get_raw_value())))
    ]
    digests = [
        f"{name} {', '.join(map(_kind, leaves))} {_digest(map(_on_host, leaves))}"
        for _, name, leaves in mirrored
    ]
    differing = [mirrored[i] for i in _differing(job, digests, f"the first run of step {step}")]
    if differing:
        _broadcast_from_chief([variable for variable, *_ in differing], mesh)
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
    """Raises if models differ in more than their values, so that arrays could not even be broadcast."""
    for process, theirs in enumerate(of_processes):
        for first, other in itertools.zip_longest(of_processes[0], theirs, fillvalue="nothing "):
            if first.rpartition(" ")[0] != other.rpartition(" ")[0]:
                raise ProcessesDifferError(
                    "The processes of the job run a step with different variables:\n"
                    f"  {first.rpartition(' ')[0]} on process 0\n"
                    f"  {other.rpartition(' ')[0]} on process {process}\n"
                    "Build the same model and optimizer in every process."
                )


def _broadcast_from_chief(variables: list[nnx.Variable[Any]], mesh: Mesh) -> None:
    to = mirrored_sharding(mesh)

    def broadcast(leaf: Any) -> Any:
        value = jnp.asarray(np.asarray(multihost_utils.broadcast_one_to_all(_on_host(leaf))))
        if is_key(leaf):
            return put(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)), to)
        return put(value, to)

    write_raw(variables, [jax.tree.map(broadcast, raw) for raw in read_raw(variables)])


_DIFFER = """\
{n} variables did not have the same values on all processes, the first of them {name}. They now have \
those of process 0. Give every process the same seed, for example nnx.Rngs(0)."""
