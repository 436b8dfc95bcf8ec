"""What it costs to feed a training loop, and whether reading and computing overlap.

    python -m benchmarks.input_pipeline             measures, and prints JSON lines
    python -m benchmarks.input_pipeline --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.input_pipeline --quick     a minute's look: few rounds, wide intervals

The step is that of the MLP of the other benchmarks. Loops take turns in each round; a turn is a whole
epoch, from the start of the iterator until its last step has ended.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import distribute_jax as dj
from benchmarks._harness import (
    Log,
    Ratio,
    environment,
    interleaved,
    ratio,
    surroundings,
    table,
    write_report,
)
from benchmarks._sources import SOURCES
from benchmarks._steps import MLP, batch_of, mesh_of, run_parts, shard_map_parts
from distribute_jax.data._source import find_source

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Loop = Callable[[], Any]
"""Runs one epoch; gives what its last step gave."""

OURS = "distribute_dataset and run"
BARE_STEP = "the step alone, on one batch"
BY_HAND = "hand-written prefetch and shard_map"
AHEAD = 2


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


QUICK = Options(batches=10, rounds=5)


def measure(options: Options) -> Log:
    """Answers the three questions."""
    log = Log()
    log.records.append(environment())
    step_ms = _in_memory(log, options)
    _waiting(log, options, step_ms / 1e3)
    _by_source(log, options)
    return log


def in_memory(batches: int) -> list[Batch]:
    """Makes an epoch of batches that lie in memory, each with numbers of its own."""
    x, y = batch_of(MLP)
    return [(x + np.float32(i / batches), y) for i in range(batches)]


def our_loop(source: Any, replicas: int) -> Loop:
    """A loop as a user writes it."""
    strategy, step, _ = run_parts(MLP, replicas)
    dataset = strategy.distribute_dataset(source)

    def loop() -> Any:
        for batch in dataset:
            loss = strategy.run(step, args=batch)
        return loss

    return loop


def hand_written_loop(source: Iterable[Batch], replicas: int) -> Loop:
    """The best loop by hand: batches are sent while earlier steps run, two at most are unfinished."""
    jitted, state, _ = shard_map_parts(MLP, replicas)
    split = NamedSharding(mesh_of(replicas), P("data"))
    held = [state]

    def sent() -> Iterator[Any]:
        ready: deque[Any] = deque()
        batches = iter(source)
        for batch in itertools.islice(batches, AHEAD):
            ready.append(jax.device_put(batch, split))
        while ready:
            yield ready.popleft()
            for batch in itertools.islice(batches, 1):
                ready.append(jax.device_put(batch, split))

    def loop() -> Any:
        unfinished: deque[Any] = deque()
        for x, y in sent():
            *held[0], loss = jitted(*held[0], x, y)
            unfinished.append(loss)
            if len(unfinished) > AHEAD:
                jax.block_until_ready(unfinished.popleft())
        return loss

    return loop


def bare_loop(batches: int, replicas: int) -> Loop:
    """Steps on one batch that lies on the devices: no input at all."""
    jitted, state, batch = shard_map_parts(MLP, replicas)
    held = [state]

    def loop() -> Any:
        unfinished: deque[Any] = deque()
        for _ in range(batches):
            *held[0], loss = jitted(*held[0], *batch)
            unfinished.append(loss)
            if len(unfinished) > AHEAD:
                jax.block_until_ready(unfinished.popleft())
        return loss

    return loop


def _in_memory(log: Log, options: Options) -> float:
    """Compares loops over data in memory; gives the milliseconds of one of our steps."""
    data = in_memory(options.batches)
    loops = {
        OURS: our_loop(data, options.replicas),
        BY_HAND: hand_written_loop(data, options.replicas),
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
        """Gives each batch after its wait."""
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
        surroundings(log.records[0]),
        "## Data in memory",
        f"MLP 784-512-10, batch {MLP.batch}: time of a step over an epoch, its ratio to {BY_HAND}, with "
        "the 95% interval of the median. Target for ours: 1.05.",
        _loops_table(log, "memory"),
        "## A source that waits as long as a step takes",
        "As for a disk or a network: the ratio of each loop to the slower of the two parts alone. "
        "Without overlap it would be 2. Target: 1.15.",
        _loops_table(log, "waiting"),
        "## Sources",
        "Examples a second of a source iterated by itself, and through `distribute_dataset` onto the "
        "devices, without a step; the ratio is of times.",
        _sources_table(log),
        "## Command",
        "    python -m benchmarks.input_pipeline --report",
    ]
    return "\n\n".join(parts) + "\n"


def _loops_table(log: Log, kind: str) -> str:
    rows = [[r["column"], f"{r['ms']:.2f}", str(Ratio(**r["ratio"]))] for r in log.of(kind)]
    return table(["loop", "ms a step", "ratio"], rows)


def _sources_table(log: Log) -> str:
    rows = [
        [r["source"], r["missing"], "", ""]
        if r["missing"]
        else [
            r["source"],
            f"{r['bare']:,.0f}",
            f"{r['distributed']:,.0f}",
            str(Ratio(**r["ratio"])),
        ]
        for r in log.of("source")
    ]
    return table(["source", "bare, examples/s", "distributed, examples/s", "time ratio"], rows)


def main() -> None:
    """Measures on eight simulated devices, and writes a report where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--report", action="store_true", help="write benchmarks/reports/…md")
    chosen = parser.parse_args()
    dj.simulate(8)
    log = measure(QUICK if chosen.quick else Options())
    if chosen.report:
        write_report("input_pipeline", log, report(log))


if __name__ == "__main__":
    main()
