"""The processes of a job compare a step before they run it for the first time.

Programs that differ would hang, or run to the end with different numbers: XLA compares nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import ProcessesDifferError
from distribute_jax._mesh import is_local
from distribute_jax._tree import is_key
from distribute_jax._values import PerReplica
from distribute_jax.processes import Job, job
from distribute_jax.program._program import Program
from distribute_jax.program.binding._arguments import Arguments

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MOST_BYTES = 1 << 20
_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\d+")


def check_same_program(step: str, program: Program, arguments: Arguments, mesh: Mesh) -> str:
    """Raises on every process where they are about to run different steps.

    Args:
        step: the name of the step.
        program: what this process has compiled.
        arguments: what it passes; host values of up to 1 MiB are compared too.
        mesh: the strategy's.

    Returns:
        The fingerprint of the program; empty where this process is alone.

    Raises:
        ProcessesDifferError: naming who differs and in what.
        DeadlineExceededError: a process has not come to any step.
    """
    found = job()
    if found is None or is_local(mesh):
        return ""
    text = _text_of(program)
    said = found.exchange("the next step to compile", json.dumps(_facts(step, text, arguments)))
    facts: list[dict[str, str]] = [json.loads(one) for one in said]
    lines = [line for key in facts[0] for line in _differences(key, [one[key] for one in facts])]
    if not lines:
        return facts[0]["program"]
    if any("program" in line for line in lines):
        lines += _first_difference(found, text)
    raise ProcessesDifferError(
        "The processes are about to run different steps together:\n" + "\n".join(lines[:12]) + "\n"
        "Every process runs the same program on batches of the same shapes. Look for what depends on the "
        "process: its arguments, its data, a seed, the time, the order of a set."
    )


def _facts(step: str, text: str, arguments: Arguments) -> dict[str, str]:
    flags = _COUNT_FLAG.sub("", os.environ.get("XLA_FLAGS", "")).split()
    return {
        "step": step,
        "shapes of the data": ", ".join(map(_shape, arguments.data)),
        "values passed": _digest(arguments.data),
        "XLA_FLAGS": " ".join(sorted(flags)),
        "program": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def _text_of(program: Program) -> str:
    text = str(program.traced.jaxpr)
    small = [np.asarray(c).tobytes() for c in program.traced.jaxpr.consts if not is_key(c)]
    return _ADDRESS.sub("", f"{text}\nconstants {hashlib.sha256(b''.join(small)).hexdigest()[:12]}")


def _shape(value: Any) -> str:
    array = value.global_array if isinstance(value, PerReplica) else value
    aval = jax.typeof(array)
    return f"{aval.dtype}{list(aval.shape)}"


def _digest(data: Sequence[Any]) -> str:
    """Gives a digest of the values that go whole to each replica, which have to be equal."""
    total = hashlib.sha256()
    for value in data:
        if isinstance(value, PerReplica) or is_key(value):
            continue
        mine = value.addressable_data(0) if isinstance(value, jax.Array) else value
        host = np.asarray(mine)
        if host.nbytes <= _MOST_BYTES:
            total.update(host.tobytes())
    return total.hexdigest()[:12]


def _differences(key: str, values: Sequence[str]) -> list[str]:
    if len(set(values)) == 1:
        return []
    others = [i for i, value in enumerate(values) if value != values[0]]
    return [f"  {key}: {values[0]} on process 0, {values[i]} on process {i}" for i in others[:3]]


def _first_difference(found: Job, text: str) -> list[str]:
    """Gives the first line of the program that is not the same on all processes."""
    short = text if len(text) < _MOST_BYTES else text[:_MOST_BYTES]
    lines = [one.split("\n") for one in found.exchange("the text of a step", short)]
    for number in range(max(map(len, lines))):
        here = [one[number].strip() if number < len(one) else "(ended)" for one in lines]
        if len(set(here)) > 1:
            other = next(i for i, line in enumerate(here) if line != here[0])
            return [
                f"  line {number + 1} of the program, on process 0: {here[0][:160]}",
                f"  line {number + 1} of the program, on process {other}: {here[other][:160]}",
            ]
    return []
