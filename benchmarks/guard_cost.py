"""What guards cost in ``fit``: a check of all copies every 100 steps, and steps that may be skipped.

    python -m benchmarks.guard_cost             measures, and prints JSON lines
    python -m benchmarks.guard_cost --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.guard_cost --quick     a minute's look: few rounds, wide intervals

Each is a call of ``fit`` for the same steps, in turns with one without a guard.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main, there
from benchmarks._harness import Log, Ratio, in_turns, interval_text, ratio, table
from benchmarks._workloads import CNN, DEEP, MLP, Workload, example_losses

BARE, CHECKED, SKIPPING = "no guard", "CheckInSync(every=100)", "skip_nonfinite=True"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, its steps in a call of ``fit``, and how many calls of each kind."""

    work: Workload
    steps: int
    replicas: int = 4
    rounds: int = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    cases: tuple[Case, ...] = (
        Case(work=MLP, steps=200),
        Case(work=DEEP, steps=500),
        Case(work=CNN, steps=100, rounds=10),
    )

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        if min(min(case.rounds, case.steps) for case in self.cases) < 1:
            raise ValueError(f"{self}: every count is at least 1.")


def fitting(case: Case, guard: str) -> Callable[[], float]:
    """Returns what times one call of ``fit``."""
    strategy = dj.MirroredStrategy(list(range(case.replicas)))
    with strategy.scope():
        model = dj.Model(case.work.model(nnx.Rngs(0)))
    skips = guard == SKIPPING
    model.compile(case.work.optimizer(), loss=example_losses, skip_nonfinite=skips)
    data = strategy.distribute_dataset([case.work.first_batch()] * case.steps)

    def seconds() -> float:
        callbacks: list[Any] = [dj.callbacks.CheckInSync()] if guard == CHECKED else []
        start = time.perf_counter()
        model.fit(data, verbose=0, callbacks=callbacks)
        return time.perf_counter() - start

    seconds()  # compiles
    return seconds


def measure(options: Options) -> Log:
    """Times every case, in turns."""
    log = Log()
    log.start()
    for case in there(options.cases, lambda case: case.replicas):
        calls = {guard: fitting(case, guard) for guard in (BARE, CHECKED, SKIPPING)}
        timings = in_turns(calls, case.rounds)
        for guard, times in timings.items():
            log.add(
                "step", workload=case.work.name, replicas=case.replicas, column=guard,
                ms=1e3 * statistics.median(times) / case.steps, ratio=ratio(times, timings[BARE]),
            )  # fmt: skip
    return log


def report(log: Log) -> str:
    """Writes the records as a page."""
    rows = [
        [r["workload"], r["replicas"], r["column"], f"{r['ms']:.2f}", interval_text(r["ratio"]),
         r["ratio"]["rounds"]]
        for r in log.of("step")
    ]  # fmt: skip
    parts = [
        "# The cost of guards",
        "A step of `fit`, in ms. The ratio is the median over the rounds of the time by that without a "
        "guard, with its 95% interval.",
        table(["workload", "replicas", "guard", "ms", "ratio", "rounds"], rows),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the ratios of each guard."""
    return [
        Row(f"step of fit, {r['workload']}", r["column"], Ratio(**r["ratio"]))
        for r in log.of("step")
        if r["column"] != BARE
    ]


BENCHMARK = Benchmark(
    name="guard_cost",
    question="What guards against bad numbers and faulty devices add to a step of fit.",
    quick=Options(
        cases=(Case(work=MLP, steps=100, rounds=5), Case(work=DEEP, steps=200, rounds=5))
    ),
    full=Options(),
    minutes=(1, 10),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
