"""What an epoch of ``fit`` costs, beside a loop of one's own and beside the best one written by hand.

    python -m benchmarks.fit             measures, and prints JSON lines
    python -m benchmarks.fit --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.fit --quick     a minute's look: few rounds, wide intervals

The columns take turns in each round; a turn is an epoch over the same data in memory, from the first
batch until its loss is on the host.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks._benchmark import Benchmark, Row, main, replicas_text, there
from benchmarks._fits import Epoch, by_hand, with_fit, with_run
from benchmarks._harness import Log, Ratio, interleaved, interval_text, ratio, table
from benchmarks._workloads import MLP, TRANSFORMER, Workload

FIT, LOOP, BY_HAND = "dj.Model.fit", "own loop of strategy.run", "hand-written loop"
COLUMNS: Mapping[str, Callable[[Workload, int, int], Epoch]] = {
    FIT: with_fit,
    LOOP: with_run,
    BY_HAND: by_hand,
}
TARGET = 1.05
"""What ``fit`` may take by the best loop written by hand, with as many batches in a dispatch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, its replicas and batches per dispatch."""

    work: Workload
    replicas: int
    together: int

    def __post_init__(self) -> None:
        """Refuses dispatches that do not make up an epoch."""
        if self.work.batches % self.together:
            raise ValueError(f"{self.work.batches} batches are not whole dispatches: {self}")


EPOCH = replace(MLP, batches=40)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    cases: tuple[Case, ...] = (
        Case(work=EPOCH, replicas=1, together=1),
        Case(work=EPOCH, replicas=4, together=1),
        Case(work=EPOCH, replicas=4, together=8),
        Case(work=TRANSFORMER, replicas=4, together=1),
    )
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        if self.rounds < 1 or not self.cases:
            raise ValueError(f"{self}: at least one round and one case.")


FULL = Options()
QUICK = Options(cases=FULL.cases[1:3], rounds=5)


def measure(options: Options) -> Log:
    """Measures every case."""
    log = Log()
    log.start()
    for case in there(options.cases, lambda case: case.replicas):
        facts = {"workload": case.work.name, "replicas": case.replicas, "together": case.together}
        epochs = {k: make(case.work, case.replicas, case.together) for k, make in COLUMNS.items()}
        log.add("losses", **facts, losses=equal_losses(epochs))
        timings = interleaved(epochs, rounds=options.rounds, calls=1, warm_up=1)
        for name, times in timings.items():
            speed = case.work.batch * case.work.batches / statistics.median(times)
            log.add(
                "epoch", **facts, column=name, examples_per_s=speed,
                loop=ratio(times, timings[LOOP]), hand=ratio(times, timings[BY_HAND]),
            )  # fmt: skip
    return log


def equal_losses(epochs: Mapping[str, Epoch]) -> dict[str, float]:
    """Runs the first epoch of every column, and raises unless the losses agree."""
    losses = {name: epoch() for name, epoch in epochs.items()}
    for name, loss in losses.items():
        if not math.isclose(loss, losses[LOOP], rel_tol=1e-3):
            raise ValueError(f"{name} trains differently: {loss} instead of {losses[LOOP]}")
    return losses


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# An epoch of fit",
        "Time of an epoch divided by that of the own loop over `run`, and by that of the best loop "
        "written by hand: `jit(shard_map)` with as many batches in a dispatch, sent ahead. Median over "
        "the rounds with its 95% interval. All columns start from the same weights; the losses of their "
        "first epoch agree to 1e-3.",
    ]
    for case, records in _cases(log).items():
        rows = [
            [
                record["column"],
                f"{record['examples_per_s']:,.0f}",
                *(interval_text(record[name]) for name in ("loop", "hand")),
            ]
            for record in records
        ]
        head = ["", "examples/s", "to the own loop", "to the hand-written"]
        parts += [f"## {case}", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _cases(log: Log) -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for r in log.of("epoch"):
        cases.setdefault(case_text(r), []).append(r)
    return cases


def case_text(record: Mapping[str, Any]) -> str:
    """Names the case of a record."""
    together = "1 batch" if record["together"] == 1 else f"{record['together']} batches"
    return f"{record['workload']}, {replicas_text(record['replicas'])}, {together} in a dispatch"


def headline(log: Log) -> list[Row]:
    """Returns ``fit`` by the loop written by hand."""
    return [
        Row(f"epoch, {case}", f"{FIT} / {BY_HAND}", Ratio(**record["hand"]), TARGET)
        for case, records in _cases(log).items()
        for record in records
        if record["column"] == FIT
    ]


BENCHMARK = Benchmark(
    name="fit",
    question="What an epoch of fit costs.",
    quick=QUICK,
    full=FULL,
    minutes=(0.5, 7),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
