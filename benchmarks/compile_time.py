"""What the first step costs, and the import: tracing, proving, lowering, compiling, beside plain JAX.

    python -m benchmarks.compile_time             measures, and prints JSON lines
    python -m benchmarks.compile_time --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.compile_time --quick     a minute's look: few rounds, wide intervals

JAX's caches are emptied before each build, and no compiled program is read from the disk. The import takes
place in a fresh process each time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from benchmarks._benchmark import Benchmark, Row, main, replicas_text, there
from benchmarks._harness import Log, Ratio, in_turns, interval_text, ratio, stopwatch, table
from benchmarks._inside import build_seconds, parts_of_build
from benchmarks._plots import Bar, draw_bars
from benchmarks._steps import (
    NNX_JIT,
    RUN,
    SHARD_MAP,
    SHARDED_JIT,
    FlatStep,
    mesh_of,
    mirrored,
    nnx_jit_parts,
    shard_map_parts,
    sharded_jit_parts,
)
from benchmarks._workloads import CNN, DEEP, MLP, RESNET50, TRANSFORMER, Workload

BUILD_TARGET, IMPORT_TARGET = 1.15, 1.1
"""What ours may take by plain JAX."""

OURS, WITH_FIT, THEIRS = "distribute_jax", "distribute_jax with fit", "jax, flax.nnx, optax"
IMPORTS = {  # names are imported at first access
    OURS: "import distribute_jax; distribute_jax.MirroredStrategy",
    WITH_FIT: "import distribute_jax; distribute_jax.MirroredStrategy, distribute_jax.Model",
    THEIRS: "import jax, flax.nnx, optax",
}
PARTS, REST = ("bind", "trace", "prove"), "lower and compile"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload that is built, and how often."""

    work: Workload
    replicas: int
    rounds: int = 30


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    cases: tuple[Case, ...] = (
        Case(work=DEEP, replicas=1),
        *(Case(work=work, replicas=4) for work in (MLP, DEEP, CNN, TRANSFORMER)),
        Case(work=RESNET50, replicas=4, rounds=3),
    )
    imports: int = 30
    """Paired rounds of imports."""

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        if min(self.imports, *(case.rounds for case in self.cases)) < 1:
            raise ValueError(f"{self}: every count is at least 1.")


FULL = Options()
QUICK = Options(
    cases=(Case(work=MLP, replicas=4, rounds=4), Case(work=DEEP, replicas=1, rounds=4)), imports=4
)


def measure(options: Options) -> Log:
    """Times the builds of every case, and the imports."""
    log = Log()
    log.start()
    for case in there(options.cases, lambda case: case.replicas):
        facts = {"workload": case.work.name, "replicas": case.replicas}
        timings = in_turns(builds(case.work, case.replicas), case.rounds)
        for name, times in timings.items():
            log.add(
                "build", **facts, column=name, ms=1e3 * statistics.median(times),
                ratio=ratio(times, timings[SHARD_MAP]),
            )  # fmt: skip
        log.add("parts", **facts, ms=_parts(case, log))
    timings = in_turns(imports(), options.imports)
    for name, times in timings.items():
        seconds = statistics.median(times)
        log.add("import", column=name, ms=1e3 * seconds, ratio=ratio(times, timings[THEIRS]))
    return log


def builds(work: Workload, replicas: int) -> dict[str, Callable[[], float]]:
    """Returns for each column what builds its step once, and how long that took."""
    mesh = mesh_of(replicas)
    train_step, arguments = nnx_jit_parts(work, mesh)

    def nnx_build() -> float:
        jax.clear_caches()
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            program = train_step.lower(*arguments).compile()
        seconds = time.perf_counter() - start
        del program
        return seconds

    return {
        RUN: partial(build_seconds, mirrored(work, replicas)),
        SHARD_MAP: partial(_plain_seconds, shard_map_parts(work, mesh)),
        SHARDED_JIT: partial(_plain_seconds, sharded_jit_parts(work, mesh)),
        NNX_JIT: nnx_build,
    }


def _plain_seconds(parts: FlatStep) -> float:
    return sum(_plain_parts(parts).values())


def _plain_parts(parts: FlatStep) -> dict[str, float]:
    jitted, state, batch = parts
    times: dict[str, float] = {}
    jax.clear_caches()
    with stopwatch(times, "trace"):
        traced = jitted.trace(*state, *batch)
    with stopwatch(times, REST):
        program = traced.lower().compile()
    del program  # to free it takes time too
    return times


def _parts(case: Case, log: Log) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of the parts of our build and of the hand-written one."""
    trained, repeats = mirrored(case.work, case.replicas), range(min(3, case.rounds))
    ours = _medians([parts_of_build(trained) for _ in repeats])
    whole = next(
        r["ms"]
        for r in log.of("build")
        if (r["workload"], r["replicas"], r["column"]) == (case.work.name, case.replicas, RUN)
    )
    ours[REST] = whole - sum(ours.values())
    by_hand = shard_map_parts(case.work, mesh_of(case.replicas))
    return {RUN: ours, SHARD_MAP: _medians([_plain_parts(by_hand) for _ in repeats])}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]}


def imports() -> dict[str, Callable[[], float]]:
    """Returns for each import what does it in a fresh process; the first ones fill the disk's caches."""
    found: dict[str, Callable[[], float]] = {
        name: partial(import_seconds, line) for name, line in IMPORTS.items()
    }
    for once in found.values():
        once()
    return found


def import_seconds(line: str) -> float:
    """Times an import in a fresh process, without the start of Python."""
    clock = f"import time; start = time.perf_counter(); {line}; print(time.perf_counter() - start)"
    # An installed package has its byte code; without it this one alone would be compiled each time.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", clock], capture_output=True, text=True, check=True, env=kept
    )
    return float(done.stdout.split()[-1])


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# Time to build and to import",
        "## The first step",
        "Tracing, lowering and compiling a step, and for ours also binding and proving, with empty "
        "caches: the median over the rounds of the time by that of the hand-written "
        f"`jit(shard_map)`, with its 95% interval. Target for ours: {BUILD_TARGET}.",
        _build_table(log),
        "## Its parts",
        "In ms. The proof's share is of our whole build.",
        _parts_table(log),
        "## Import",
        f"In fresh processes, in turns, without the start of Python. Target: {IMPORT_TARGET}.",
        table(
            ["import", "ms", "ratio"],
            [[r["column"], f"{r['ms']:.0f}", interval_text(r["ratio"])] for r in log.of("import")],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _build_table(log: Log) -> str:
    rows = [
        [
            *(r["workload"], r["replicas"], r["column"], f"{r['ms']:.0f}"),
            *(interval_text(r["ratio"]), r["ratio"]["rounds"]),
        ]
        for r in log.of("build")
    ]
    return table(["workload", "replicas", "step", "ms", "ratio", "rounds"], rows)


def _parts_table(log: Log) -> str:
    rows = []
    for record in log.of("parts"):
        for column, ms in record["ms"].items():
            cells = [f"{ms[part]:.0f}" if part in ms else "" for part in (*PARTS, REST)]
            share = f"{100 * ms['prove'] / sum(ms.values()):.1f}%" if "prove" in ms else ""
            rows.append([record["workload"], record["replicas"], column, *cells, share])
    return table(["workload", "replicas", "step", *PARTS, REST, "proof's share"], rows)


def headline(log: Log) -> list[Row]:
    """Returns our builds and our import by those of plain JAX."""
    rows = [
        Row(
            f"build, {r['workload']}, {replicas_text(r['replicas'])}",
            f"{RUN} / {SHARD_MAP}",
            Ratio(**r["ratio"]),
            BUILD_TARGET,
        )
        for r in log.of("build")
        if r["column"] == RUN
    ]
    (ours,) = (r for r in log.of("import") if r["column"] == OURS)
    return [*rows, Row("import", f"{OURS} / {THEIRS}", Ratio(**ours["ratio"]), IMPORT_TARGET)]


def draw(log: Log, path: Path) -> None:
    """Draws the parts of each build on top of each other."""
    bars = [
        Bar(f"{r['workload']}, {replicas_text(r['replicas'])}", column, ms)
        for r in log.of("parts")
        for column, ms in r["ms"].items()
    ]
    draw_bars(bars, path, y="ms")


BENCHMARK = Benchmark(
    name="compile_time",
    question="What the first step and the import cost.",
    quick=QUICK,
    full=FULL,
    minutes=(0.8, 16),
    measure=measure,
    report=report,
    headline=headline,
    draw=draw,
)

if __name__ == "__main__":
    main(BENCHMARK)
