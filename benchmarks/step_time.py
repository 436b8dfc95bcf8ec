"""What a training step costs under ``strategy.run``, beside the other ways to write it.

    python -m benchmarks.step_time             measures, and prints JSON lines
    python -m benchmarks.step_time --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.step_time --quick     a minute's look: few rounds, wide intervals

Two questions: how long a step takes as a ratio to hand-written JAX, and what ``run`` adds on the host to
the compiled program's own call.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._benchmark import Benchmark, Row, main, replicas_text, there
from benchmarks._functional import FUNCTIONAL, JIT, RUN as RUN_FUNCTIONAL
from benchmarks._harness import (
    Log,
    Ratio,
    calls_within,
    dispatches,
    interleaved,
    interval_text,
    ratio,
    table,
)
from benchmarks._inside import host_seconds
from benchmarks._plots import Line, draw_lines
from benchmarks._steps import COLUMNS, RUN, SHARD_MAP, Step, mirrored, total_loss, with_shard_map
from benchmarks._workloads import CNN, DEEP, MLP, TRANSFORMER, Workload

BASELINE = SHARD_MAP
FIXED_US, PER_VARIABLE_US = 30.0, 0.35
"""The target for the host time of ``run`` beyond the compiled program's own call."""
TARGETS = {DEEP.name: 1.4}
"""For the loop under ``run`` by the hand-written one: a step of many variables is all dispatch."""
COMPUTING = 1.0
"""The target where computing dominates."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    cases: tuple[tuple[Workload, int], ...] = tuple(
        (work, n) for work in (MLP, CNN, TRANSFORMER, DEEP) for n in (1, 2, 4, 8)
    )
    """Workload and number of replicas; those that need more devices than there are stay out."""
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""
    calls: int = 5
    """Steps in one turn of a column where each step is waited for."""
    loop_calls: int = 20
    """Steps in one turn of a column where up to two are unfinished."""
    turn: float = 0.2
    """Seconds after which a turn of a large workload has enough steps. A step that takes as long by
    itself is only timed in the loop: no host time shows beside it."""
    host_calls: int = 1000
    """Calls whose host time is taken."""
    equal_steps: int = 5
    """First steps whose losses must agree in all columns."""
    functional: tuple[str, ...] = tuple(FUNCTIONAL)
    """Programs whose state goes in and out of the step, on one replica."""
    functional_calls: int = 100
    """Steps in one turn of such a program."""

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        counts = (self.rounds, self.calls, self.loop_calls, self.host_calls, self.equal_steps)
        if min(counts) < 1 or not (self.cases or self.functional):
            raise ValueError(f"{self}: every count is at least 1, and there is at least one case.")


FULL = Options()
QUICK = Options(
    cases=((MLP, 1), (MLP, 4), (CNN, 4), (DEEP, 1)), rounds=6, calls=2, loop_calls=4, host_calls=200
)


def measure(options: Options) -> Log:
    """Answers both questions for every case."""
    log = Log()
    log.start()
    for name in options.functional:  # first: what larger programs leave behind would slow them
        log.add("functional", program=name, **_functional(name, options))
    for work, replicas in there(options.cases, lambda case: case[1]):
        case = {"workload": work.name, "replicas": replicas, "variables": work.variables()}
        _step_times(log, case, work, replicas, options)
        log.add("host", **case, **_host_times(work, replicas, options.host_calls))
    return log


def _functional(name: str, options: Options) -> dict[str, Any]:
    """Times a program of state in and out under ``run`` and under ``jit``, each step waited for."""
    program = FUNCTIONAL[name]
    steps = program.steps()
    calls = calls_within(options.turn, steps[JIT], options.functional_calls, least=1)
    timings = interleaved(steps, rounds=options.rounds, calls=calls, ahead=0)
    ours, theirs = timings[RUN_FUNCTIONAL], timings[JIT]
    us = {"run_us": 1e6 * statistics.median(ours), "jit_us": 1e6 * statistics.median(theirs)}
    if program.beyond_us is None:
        return {**us, "target": program.ratio, "ratio": ratio(ours, theirs)}
    beyond = [run - jit for run, jit in zip(ours, theirs, strict=True)]
    limit = [1e-6 * program.beyond_us] * len(beyond)
    return {**us, "beyond_us": program.beyond_us, "target": 1.0, "ratio": ratio(beyond, limit)}


def _step_times(
    log: Log, case: dict[str, Any], work: Workload, replicas: int, options: Options
) -> None:
    steps = {name: make(work, replicas) for name, make in COLUMNS.items()}
    log.add("losses", **case, losses=equal_losses(steps, options.equal_steps))
    for kind, most, ahead in (("loop", options.loop_calls, 2), ("step", options.calls, 0)):
        least = ahead + 1 if ahead else 0
        calls = calls_within(options.turn, steps[BASELINE], most, least)
        if not calls:
            continue
        timings = interleaved(steps, rounds=options.rounds, calls=calls, ahead=ahead)
        for name, times in timings.items():
            step_ms = 1e3 * statistics.median(times)
            log.add(kind, **case, column=name, ms=step_ms, ratio=ratio(times, timings[BASELINE]))


def equal_losses(steps: Mapping[str, Step], number: int) -> dict[str, list[float]]:
    """Runs the first steps of every column and raises unless the losses agree to rounding."""
    losses = {name: [total_loss(step()) for _ in range(number)] for name, step in steps.items()}
    for name, values in losses.items():
        pairs = zip(values, losses[BASELINE], strict=True)
        if not all(math.isclose(a, b, rel_tol=2e-5) for a, b in pairs):
            raise ValueError(f"{name} trains differently: {values} instead of {losses[BASELINE]}")
    return losses


def _host_times(work: Workload, replicas: int, calls: int) -> dict[str, Any]:
    """Returns the host time in µs of one call, in a loop and beyond the compiled program's own call."""
    trained, by_hand = mirrored(work, replicas), with_shard_map(work, replicas)
    slow = calls_within(calls * 1e-3, by_hand, calls, least=5)
    timings = dispatches({"run": trained.run, "hand": by_hand}, slow)
    beyond = host_seconds(trained, calls)
    target = 1e-6 * (FIXED_US + PER_VARIABLE_US * work.variables())
    return {
        "run_us": 1e6 * statistics.median(timings["run"]),
        "hand_us": 1e6 * statistics.median(timings["hand"]),
        "beyond_us": 1e6 * statistics.median(beyond),
        "beyond_least_us": 1e6 * min(beyond),
        "target_us": 1e6 * target,
        "ratio": ratio(beyond, [target] * len(beyond)),
    }


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# Step time",
        "## Ratio to hand-written JAX",
        "The median over the rounds of the time of a step divided by that of the donated "
        "`jit(shard_map)` over flat arrays, with its 95% interval. In the loop up to two steps are "
        "unfinished, as in training that does not read each loss; waited, each step is finished "
        "before the next begins, so that all host time shows; steps of more than 0.2 s are not timed so, "
        "since none would.",
        *_step_tables(log),
        "## Host time of one call",
        "`beyond` is the call of `run` with a compiled program that returns at once: what the "
        f"library adds. Target: {FIXED_US:.0f} µs + {PER_VARIABLE_US} µs per variable. `run` and "
        "`by hand` are the calls until they return, in turns in one loop where each step is waited "
        "for, so that caches are cold.",
        _host_table(log),
        "## State in and out",
        "Programs as JAX's own examples are written, whose state is an argument and a result, on one "
        "replica, beside the same step under `jax.jit`; each step is waited for. Target: at most 40 µs "
        "more, 100 µs with a new batch from the host each step, and 1.05 times where a step is long.",
        _functional_table(log),
    ]
    return "\n\n".join(parts) + "\n"


def _cases(log: Log, kind: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in log.of(kind):
        cases.setdefault((record["workload"], record["replicas"]), []).append(record)
    return cases


def _step_tables(log: Log) -> Iterator[str]:
    waited = _cases(log, "step")
    for (workload, replicas), records in _cases(log, "loop").items():
        rounds = records[0]["ratio"]["rounds"]
        yield f"### {workload}, {replicas_text(replicas)} ({rounds} rounds)"
        beside = {b["column"]: b for b in waited.get((workload, replicas), ())}
        rows = [[a["column"], *_texts(a), *_texts(beside.get(a["column"]))] for a in records]
        yield table(["step", "loop ms", "loop ratio", "waited ms", "waited ratio"], rows)


def _texts(record: Mapping[str, Any] | None) -> tuple[str, str]:
    return (f"{record['ms']:.3f}", interval_text(record["ratio"])) if record else ("", "")


def _host_table(log: Log) -> str:
    head = ["workload", "replicas", "variables", "beyond µs", "least µs", "target µs"]
    names = ("beyond_us", "beyond_least_us", "target_us", "run_us", "hand_us")
    rows = [
        [
            *(record["workload"], record["replicas"], record["variables"]),
            *(f"{record[name]:.0f}" for name in names),
        ]
        for record in log.of("host")
    ]
    return table([*head, "run µs", "by hand µs"], rows)


def _functional_table(log: Log) -> str:
    rows = [
        [r["program"], f"{r['run_us']:.0f}", f"{r['jit_us']:.0f}", interval_text(r["ratio"])]
        for r in log.of("functional")
    ]
    return table(["program", "run µs", "jit µs", "by its target, or by jit"], rows)


def headline(log: Log) -> list[Row]:
    """Returns ours by the yardstick for each case, and the host time by its target."""
    rows = [
        Row(
            f"step, {r['workload']}, {replicas_text(r['replicas'])}",
            f"{RUN} / {BASELINE}",
            Ratio(**r["ratio"]),
            TARGETS.get(r["workload"], COMPUTING),
        )
        for r in log.of("loop")
        if r["column"] == RUN
    ]
    for r in log.of("host"):
        question = f"host time, {r['variables']} variables, {replicas_text(r['replicas'])}"
        limit = f"run beyond the program / {r['target_us']:.0f} µs"
        rows.append(Row(question, limit, Ratio(**r["ratio"]), 1.0))
    for r in log.of("functional"):
        limit = f"run beyond jit / {r['beyond_us']:.0f} µs" if "beyond_us" in r else "run / jit"
        rows.append(Row(f"step, {r['program']}", limit, Ratio(**r["ratio"]), r["target"]))
    return rows


def draw(log: Log, path: Path) -> None:
    """Draws the ratio of each column by the number of replicas, workload by workload."""
    lines = [
        Line(r["workload"], r["column"], r["replicas"], Ratio(**r["ratio"])) for r in log.of("loop")
    ]
    draw_lines(lines, path, x="replicas", y="time of a step / hand-written")


BENCHMARK = Benchmark(
    name="step_time",
    question="What a training step costs under strategy.run.",
    quick=QUICK,
    full=FULL,
    minutes=(0.8, 22),
    measure=measure,
    report=report,
    headline=headline,
    draw=draw,
)

if __name__ == "__main__":
    main(BENCHMARK)
