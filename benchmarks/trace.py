"""How much of an epoch the devices stand still, beside the best loop written by hand.

    python -m benchmarks.trace             traces, and prints JSON lines
    python -m benchmarks.trace --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.trace --quick     few epochs

Each epoch is traced by ``jax.profiler``; the columns take turns. What the devices compute should be the
same in all of them, and what is left is the host's: reading, placing and dispatching.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks._benchmark import Benchmark, Row, main, there
from benchmarks._harness import Log, Ratio, interval_text, ratio, table
from benchmarks._traced import Activity, activity
from benchmarks.fit import BY_HAND, COLUMNS, EPOCH, FIT, Case, Options, case_text, equal_losses

FIGURES = ("whole", "running", "still", "operations")


FULL = Options(
    cases=tuple(Case(work=EPOCH, replicas=n, together=k) for n, k in ((1, 1), (4, 1), (4, 8)))
)
QUICK = Options(cases=FULL.cases[1:2], rounds=3)


def measure(options: Options) -> Log:
    """Traces every column of every case."""
    log = Log()
    log.start()
    for case in there(options.cases, lambda case: case.replicas):
        facts = {"workload": case.work.name, "replicas": case.replicas, "together": case.together}
        epochs = {k: make(case.work, case.replicas, case.together) for k, make in COLUMNS.items()}
        equal_losses(epochs)
        seen: dict[str, list[Activity]] = {name: [] for name in epochs}
        for _ in range(options.rounds):
            for name, epoch in epochs.items():
                seen[name].append(activity(epoch))
        for name, own in seen.items():
            log.add(
                "trace", **facts, column=name, **_figures(own, seen[BY_HAND], case.work.batches)
            )
    return log


def _figures(own: list[Activity], hand: list[Activity], batches: int) -> Mapping[str, Any]:
    """Returns the milliseconds of a step, and the time of the operations by that of the hand-written."""
    ms = {
        name: 1e3 * statistics.median(getattr(one, name) for one in own) / batches
        for name in FIGURES
    }
    return {**ms, "ratio": ratio([a.operations for a in own], [a.operations for a in hand])}


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# What the devices do in an epoch",
        "Milliseconds of one step, medians over traced epochs. *Running*: at least one device ran an "
        "operation; *still*: none did; *operations*: the time in which each device ran one, added up; they "
        "wait for a core where there are fewer cores than devices. The last column is the operations' "
        "time by that of the best hand-written loop, with its 95% interval. Tracing itself costs time.",
    ]
    cases: dict[str, list[list[str]]] = {}
    for r in log.of("trace"):
        figures = [f"{r[name]:.2f}" for name in FIGURES]
        cases.setdefault(case_text(r), []).append(
            [r["column"], *figures, interval_text(r["ratio"])]
        )
    for case, rows in cases.items():
        parts += [f"## {case}", table(["", *FIGURES, "operations, to by hand"], rows)]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the operations' time under ``fit`` by that of the loop written by hand."""
    return [
        Row(
            f"operations of an epoch, {case_text(r)}",
            f"{FIT} / {BY_HAND}",
            Ratio(**r["ratio"]),
        )
        for r in log.of("trace")
        if r["column"] == FIT
    ]


BENCHMARK = Benchmark(
    name="trace",
    question="What the devices do in an epoch, as jax.profiler sees it.",
    quick=QUICK,
    full=FULL,
    minutes=(0.2, 2),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
