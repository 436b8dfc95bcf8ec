"""What every benchmark is: options, a measurement, a page, a picture, and its ratios in a few rows."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

import distribute_jax as dj
from benchmarks._harness import Log, Ratio, surroundings, write_report

SIMULATED_DEVICES = 8
ENOUGH_ROUNDS = 30
"""Fewer paired rounds decide nothing."""

Options = TypeVar("Options")


@dataclass(frozen=True)
class Row:
    """One answer: a ratio, and what it should at most be."""

    question: str
    column: str
    ratio: Ratio
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the lower end of the interval meets the target; None where nothing is decided."""
        if self.target is None or 0 < self.ratio.rounds < ENOUGH_ROUNDS:
            return None
        return self.ratio.low <= self.target

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        target = "" if self.target is None else f"≤ {self.target:.2f}"
        few = f"only {self.ratio.rounds} rounds" if target else ""
        return [
            self.question,
            self.column,
            str(self.ratio),
            target,
            {True: "met", False: "not met", None: few}[self.met],
        ]


ROW_HEAD = ("question", "column", "ratio", "target", "")


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[Options]):
    """A question that is answered by measuring."""

    name: str
    """That of its module."""
    question: str
    quick: Options
    full: Options
    minutes: tuple[float, float]
    """About how long it takes on two cores, quick and full."""
    measure: Callable[[Options], Log]
    report: Callable[[Log], str]
    """Writes the records as a page."""
    headline: Callable[[Log], list[Row]]
    """Returns the ratios that answer the question."""
    draw: Callable[[Log, Path], None] | None = None
    """Draws a picture of the records into a PNG file."""

    def page(self, log: Log, options: str = "--report") -> str:
        """Writes the page of this benchmark alone; ``options`` are those of its command line."""
        title, _, rest = self.report(log).partition("\n\n")
        command = f"## Command\n\n    python -m benchmarks.{self.name} {options}\n"
        return f"{title}\n\n{surroundings(log.records[0])}\n\n{rest}\n{command}"


def main(benchmark: Benchmark[Any]) -> list[Row]:
    """Measures one benchmark, prints JSON lines, writes a page where asked, and returns the headline."""
    parser = argparse.ArgumentParser(description=benchmark.question)
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--report", action="store_true", help="write benchmarks/reports/…md")
    parser.add_argument("--cases", type=int, nargs="+", help="only these of its cases, from 0")
    parser.add_argument("--rounds", type=int, help="paired rounds, where it is timed")
    add_devices(parser)
    chosen = parser.parse_args()
    options = benchmark.quick if chosen.quick else benchmark.full
    if chosen.cases:
        options = replace(options, cases=tuple(options.cases[i] for i in chosen.cases))
    if chosen.rounds:
        options = replace(options, rounds=chosen.rounds)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        start_devices(chosen.devices)
        log = benchmark.measure(options)
    except KeyboardInterrupt:
        sys.exit(130)
    rows = benchmark.headline(log)
    for row in rows:
        log.add("headline", **asdict(row))
    if chosen.report:
        write_report(benchmark.name, log, benchmark.page(log, " ".join(sys.argv[1:])))
    return rows


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Lets the command line choose the devices."""
    text = "8 simulated CPU devices (default), or those that JAX finds"
    kinds = ("simulated", "real")
    parser.add_argument("--devices", choices=kinds, default="simulated", help=text)


def start_devices(kind: str) -> None:
    """Starts JAX, and leaves no compiled program from an earlier run in the way."""
    if kind == "simulated":
        dj.simulate(SIMULATED_DEVICES)
    jax.config.update("jax_enable_compilation_cache", False)


def rows_of(log: Log) -> list[Row]:
    """Reads the headline back from the records."""
    return [
        Row(r["question"], r["column"], Ratio(**r["ratio"]), r["target"])
        for r in log.of("headline")
    ]


def replicas_text(replicas: int) -> str:
    """Writes a number of replicas."""
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def there(cases: tuple[Any, ...], replicas: Callable[[Any], int]) -> list[Any]:
    """Leaves out the cases that need more devices than there are."""
    return [case for case in cases if replicas(case) <= jax.device_count()]
