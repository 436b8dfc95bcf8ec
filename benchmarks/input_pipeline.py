"""What it costs to feed a training loop, and whether reading and computing overlap.

    python -m benchmarks.input_pipeline             measures, and prints JSON lines
    python -m benchmarks.input_pipeline --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.input_pipeline --quick     a minute's look: few rounds, wide intervals

The step is that of the MLP of the other benchmarks. Loops take turns in each round; a turn is a whole
epoch, from the start of the iterator until its last step has ended.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._harness import Log, Ratio, interleaved, interval_text, ratio, table
from benchmarks._loops import Loop, hand_written_loop, training_loop
from benchmarks._sources import SOURCES
from benchmarks._steps import mesh_of, mirrored, shard_map_parts
from benchmarks._workloads import MLP, Array
from distribute_jax.data.sources import find_source

Batch = tuple[Array, Array]
OURS = "distribute_dataset and run"
BARE_STEP = "the step alone, on one batch"
BY_HAND = "hand-written prefetch and shard_map"
IN_MEMORY, WAITING = 1.05, 1.15
"""Targets for our loop: by the one written by hand, and by the slower of source and steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    replicas: int = 4
    batches: int = 20
    """Batches of one epoch."""
    rounds: int = 40
    """Paired rounds; at least 30 for an interval worth stating."""
    sources: tuple[str, ...] = tuple(SOURCES)
    """The sources whose examples are counted."""

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        if min(self.replicas, self.batches, self.rounds) < 1:
            raise ValueError(f"{self}: every number is at least 1.")


FULL = Options()
QUICK = Options(batches=10, rounds=5)


def measure(options: Options) -> Log:
    """Answers the three questions."""
    log = Log()
    log.start()
    options = replace(options, replicas=min(options.replicas, jax.device_count()))
    step_ms = _in_memory(log, options)
    _waiting(log, options, step_ms / 1e3)
    _by_source(log, options)
    return log


def in_memory(batches: int) -> list[Batch]:
    """Makes an epoch of batches in memory, each with other numbers."""
    x, y = MLP.first_batch()
    return [(x + np.float32(i / batches), y) for i in range(batches)]


def our_loop(source: Any, replicas: int) -> Loop:
    """A loop as a user writes it."""
    trained = mirrored(MLP, replicas)
    strategy, dataset = trained.strategy, trained.strategy.distribute_dataset(source)

    def loop() -> Any:
        for batch in dataset:
            loss = strategy.run(trained.step, args=batch)
        return loss

    return loop


def bare_loop(batches: int, replicas: int) -> Loop:
    """Steps on one batch that is on the devices: no input at all."""
    jitted, state, batch = shard_map_parts(MLP, mesh_of(replicas))
    return training_loop(jitted, state, lambda: [batch] * batches)


def _in_memory(log: Log, options: Options) -> float:
    """Compares loops over data in memory; gives the milliseconds of one of our steps."""
    data = in_memory(options.batches)
    loops = {
        OURS: our_loop(data, options.replicas),
        BY_HAND: hand_written_loop(MLP, data, options.replicas),
        BARE_STEP: bare_loop(options.batches, options.replicas),
    }
    timings = interleaved(loops, rounds=options.rounds, calls=1)
    for name, times in timings.items():
        ms = 1e3 * statistics.median(times) / options.batches
        log.add("memory", column=name, ms=ms, ratio=ratio(times, timings[BY_HAND]))
    return 1e3 * statistics.median(timings[OURS]) / options.batches


class Waiting:
    """Batches of which each is waited for, as for a disk or a network."""

    def __init__(self, batches: list[Batch], seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __iter__(self) -> Iterator[Batch]:
        """Returns each batch after its wait."""
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


def _waiting(log: Log, options: Options, seconds: float) -> None:
    """Compares a loop over a source that waits as long as a step takes with the slower of the two."""
    data = in_memory(options.batches)
    source = Waiting(data, seconds)
    loops: dict[str, Loop] = {
        "both": our_loop(source, options.replicas),
        "the steps": our_loop(data, options.replicas),
        "the source": lambda: deque(source, maxlen=0) and None,
    }
    timings = interleaved(loops, rounds=options.rounds, calls=1)
    slower = [max(pair) for pair in zip(timings["the steps"], timings["the source"], strict=True)]
    for name, times in timings.items():
        ms = 1e3 * statistics.median(times) / options.batches
        log.add("waiting", column=name, ms=ms, ratio=ratio(times, slower))


def _by_source(log: Log, options: Options) -> None:
    """Counts the examples a second of each source, iterated bare and distributed."""
    x, y = (np.concatenate(parts) for parts in zip(*in_memory(options.batches), strict=True))
    strategy = dj.MirroredStrategy(list(range(options.replicas)))
    for name in options.sources:
        source, missing = SOURCES[name](x, y, MLP.batch)
        if missing:
            log.add("source", source=name, missing=missing)
            continue
        dataset = strategy.distribute_dataset(source)
        loops: dict[str, Loop] = {
            "bare": partial(_last, source),
            "distributed": partial(_last, dataset),
        }
        timings = interleaved(loops, rounds=options.rounds, calls=1, warm_up=1)
        rates = {k: len(x) / statistics.median(times) for k, times in timings.items()}
        log.add(
            "source",
            source=name,
            missing=None,
            **rates,
            ratio=ratio(timings["distributed"], timings["bare"]),
        )


def _last(source: Any) -> Any:
    """Iterates over a source by itself; gives its last batch where there is something to wait for."""
    if isinstance(source, dj.data.ArrayDataset):
        source = find_source(source).open()
    last = deque(source() if callable(source) else source, maxlen=1)[0]
    return last if isinstance(source, dj.DistributedDataset) else None


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# Input pipeline",
        "## Data in memory",
        f"MLP 784-512-10, batch {MLP.batch}: time of a step over an epoch, its ratio to {BY_HAND}, with "
        f"the 95% interval of the median. Target for ours: {IN_MEMORY}.",
        _loops_table(log, "memory"),
        "## A source that waits as long as a step takes",
        "As for a disk or a network: the ratio of each loop to the slower of the two parts alone. "
        f"Without overlap it would be 2. Target: {WAITING}.",
        _loops_table(log, "waiting"),
        "## Sources",
        "Examples a second of a source iterated by itself, and through `distribute_dataset` onto the "
        "devices, without a step; the ratio is of times.",
        _sources_table(log),
    ]
    return "\n\n".join(parts) + "\n"


def _loops_table(log: Log, kind: str) -> str:
    rows = [[r["column"], f"{r['ms']:.2f}", interval_text(r["ratio"])] for r in log.of(kind)]
    return table(["loop", "ms a step", "ratio"], rows)


def _sources_table(log: Log) -> str:
    rows = [
        [r["source"], r["missing"], "", ""]
        if r["missing"]
        else [
            r["source"],
            f"{r['bare']:,.0f}",
            f"{r['distributed']:,.0f}",
            interval_text(r["ratio"]),
        ]
        for r in log.of("source")
    ]
    return table(["source", "bare, examples/s", "distributed, examples/s", "time ratio"], rows)


def headline(log: Log) -> list[Row]:
    """Returns our loop by the one written by hand, and by the slower of a source and the steps."""
    asked = (
        ("memory", OURS, BY_HAND, "input in memory", IN_MEMORY),
        ("waiting", "both", "the slower part", "input that waits as long as a step", WAITING),
    )
    return [
        Row(question, f"{ours} / {theirs}", Ratio(**record["ratio"]), target)
        for kind, ours, theirs, question, target in asked
        for record in log.of(kind)
        if record["column"] == ours
    ]


BENCHMARK = Benchmark(
    name="input_pipeline",
    question="What it costs to feed a training loop.",
    quick=QUICK,
    full=FULL,
    minutes=(0.4, 3),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
