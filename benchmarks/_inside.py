"""What the benchmarks read from inside the package: the parts of a build, and the compiled program."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from math import prod
from typing import Any
from unittest import mock

import jax

from benchmarks._harness import stopwatch
from benchmarks._steps import Trained
from distribute_jax.program import RunOptions, _call as _entry
from distribute_jax.program._arguments import flatten_arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._cache import Request
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._plan import input_marks
from distribute_jax.program._program import build
from distribute_jax.program._replication import prove
from distribute_jax.program._trace import Call, trace


def entry_of(trained: Trained) -> tuple[BoundProgram, list[Any]]:
    """Returns the program that a call of ``run`` would use, compiled if need be, and its values."""
    strategy = trained.strategy
    arguments = flatten_arguments(trained.batch, {}, strategy.mesh)
    request = Request(trained.step, arguments, RunOptions())
    return strategy._runner.entry(request), request.roots


def compiled_of(trained: Trained) -> Any:
    """Returns the compiled program of a step."""
    return entry_of(trained)[0].program.compiled


def build_seconds(trained: Trained) -> float:
    """Times binding, tracing, proving, lowering and compiling a step."""
    jax.clear_caches()
    start = time.perf_counter()
    program = build(_call(trained), RunOptions(), trained.strategy._replicas)
    seconds = time.perf_counter() - start
    del program  # to free it takes time too
    return seconds


def parts_of_build(trained: Trained) -> dict[str, float]:
    """Times the parts of what comes before lowering."""
    times: dict[str, float] = {}
    jax.clear_caches()
    with stopwatch(times, "bind"):
        call = _call(trained)
    with stopwatch(times, "trace"):
        traced = trace(call)
    with stopwatch(times, "prove"):
        marks = input_marks(call, traced)
        prove(traced.jaxpr, marks, axis_size=trained.strategy.num_replicas_in_sync)
    return times


def _call(trained: Trained) -> Call:
    strategy = trained.strategy
    arguments = flatten_arguments(trained.batch, {}, strategy.mesh)
    binding = Binding(trained.step, arguments)
    return Call(trained.step, binding, arguments, strategy, strategy.mesh)


BURSTS, PAUSE = 31, 0.03
"""A thousand calls take no longer than a moment's noise, so they are spread over a second."""


def host_seconds(trained: Trained, calls: int) -> list[float]:
    """Times ``run`` with a program that returns its state and old results at once: medians of bursts."""
    program = entry_of(trained)[0].program
    compiled, state, results = program.compiled, program.donated_state, []

    def once(*flat: Any) -> list[Any]:
        outs = compiled(*flat)
        results.extend(outs[state:])
        return outs

    program.compiled = once
    trained.run()
    # Nothing here may refer to the state, since run would copy it.
    program.compiled = lambda *flat: [*flat[:state], *results]
    bursts = min(BURSTS, calls)
    # The real program is called in C, and this one passes for such.
    with mock.patch.object(_entry, "call_in_c", lambda compiled: compiled):
        return [_burst(trained, calls // bursts) for _ in range(bursts)]


def _burst(trained: Trained, calls: int) -> float:
    time.sleep(PAUSE)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        trained.run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
"""What devices send each other, as XLA calls it."""
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$", re.MULTILINE)
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})\(")
_CALLED = re.compile(r"(?:body|to_apply|calls|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def collectives_of(text: str) -> Iterator[tuple[str, int, int]]:
    """Returns each collective of a compiled program: its kind, how often a step does it, and its bytes."""
    pieces = _COMPUTATION.split(text)
    bodies = dict(zip(pieces[2::3], pieces[3::3], strict=True))
    todo = [(name, 1) for entry, name in zip(pieces[1::3], pieces[2::3], strict=True) if entry]
    while todo:
        name, times = todo.pop()
        for line in bodies[name].splitlines():
            if match := _COLLECTIVE.search(line):
                arrays = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", match[1])
                sizes = [
                    int(b or 8) // 8 * prod(map(int, filter(None, d.split(","))))
                    for _, b, d in arrays
                ]
                yield match[2], times, sum(sizes)
            rounds = int(found[1]) if (found := _ROUNDS.search(line)) else 1
            for called in _CALLED.findall(line):
                todo += [(each.lstrip("%"), times * rounds) for each in called.split(", ")]
