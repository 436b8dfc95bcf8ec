"""What an all-reduce costs under each cross-device operation, by the size of the array.

    python -m benchmarks.collectives             measures, and prints JSON lines
    python -m benchmarks.collectives --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.collectives --quick     a minute's look: few rounds, wide intervals

Every operation takes its turn in each round, on the same arrays. Before that their sums are compared,
so that no figure is of a wrong result.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main, replicas_text, there
from benchmarks._harness import Log, Ratio, interleaved, interval_text, ratio, table

BASELINE = "native"
OPERATIONS: dict[str, Callable[[], dj.CrossDeviceOps]] = {
    BASELINE: dj.NcclAllReduce,
    "hierarchical": dj.HierarchicalCopyAllReduce,
    "ring": dj.RingAllReduce,
    "to one device": dj.ReductionToOneDevice,
}
"""The four reductions; ``native`` is XLA's own."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    sizes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
    """Bytes of the array that each replica holds, a multiple of 4."""
    replicas: tuple[int, ...] = (2, 4, 8)
    """Numbers of replicas."""
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""
    calls: int = 5
    """All-reduces in one turn of an operation."""

    def __post_init__(self) -> None:
        """Refuses numbers with which nothing would be measured."""
        if min(self.rounds, self.calls, *self.replicas, *self.sizes) < 1:
            raise ValueError(f"{self}: every number is at least 1.")
        if any(size % 4 for size in self.sizes):
            raise ValueError(f"{self}: the arrays are float32, so sizes are multiples of 4.")


FULL = Options()
QUICK = Options(sizes=(1 << 10, 1 << 20), replicas=(4,), rounds=5, calls=2)


def measure(options: Options) -> Log:
    """Times every operation at every size."""
    log = Log()
    log.start()
    for replicas in there(options.replicas, int):
        for size in options.sizes:
            _measure_size(log, replicas, size, options)
    return log


def _measure_size(log: Log, replicas: int, size: int, options: Options) -> None:
    steps = {name: all_reduce_by(make(), replicas, size) for name, make in OPERATIONS.items()}
    check_equal_sums({name: np.asarray(step()) for name, step in steps.items()})
    timings = interleaved(steps, rounds=options.rounds, calls=options.calls)
    for name, times in timings.items():
        seconds = statistics.median(times)
        log.add(
            "all_reduce",
            operation=name,
            replicas=replicas,
            bytes=size,
            us=1e6 * seconds,
            gb_per_s=bandwidth(size, replicas, seconds),
            ratio=ratio(times, timings[BASELINE]),
        )


def all_reduce_by(ops: dj.CrossDeviceOps, replicas: int, size: int) -> Callable[[], jax.Array]:
    """Returns what dispatches one all-reduce of an array that differs on each replica."""
    strategy = dj.MirroredStrategy(list(range(replicas)), cross_device_ops=ops)
    values = np.random.default_rng(0).uniform(size=(replicas, size // 4)).astype(np.float32)
    held = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )

    def step(x: jax.Array) -> Any:
        return dj.get_replica_context().all_reduce("sum", x)

    return lambda: strategy.run(step, args=(held,))


def bandwidth(size: int, replicas: int, seconds: float) -> float:
    """Returns GB/s that each replica sends, at the least that an all-reduce needs: 2 (N-1) / N of it."""
    return 2 * (replicas - 1) / replicas * size / seconds / 1e9


def check_equal_sums(sums: dict[str, np.ndarray[Any, Any]]) -> None:
    """Raises unless all operations give the sum of the baseline to rounding."""
    for name, total in sums.items():
        if not np.allclose(total, sums[BASELINE], rtol=1e-6, atol=0):
            raise ValueError(f"{name} gives another sum than {BASELINE}.")


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# All-reduce by size",
        "One call of `strategy.run` that sums a float32 array over the replicas, waited for. The "
        "bandwidth is what each replica must send at least, 2 (N-1) / N of the array, by the median "
        "time; the ratio is the median over the rounds of the time by that of `native`, with its 95% "
        "interval. Small arrays show what a call costs on the host, the same for all.",
    ]
    records = list(log.of("all_reduce"))
    for replicas in dict.fromkeys(record["replicas"] for record in records):
        parts += [
            f"## {replicas_text(replicas)}",
            _table([r for r in records if r["replicas"] == replicas]),
        ]
    return "\n\n".join(parts) + "\n"


def _table(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            _size_text(record["bytes"]),
            record["operation"],
            f"{record['us']:.0f}",
            f"{record['gb_per_s']:.3f}",
            interval_text(record["ratio"]),
        ]
        for record in records
    ]
    return table(["array", "operation", "µs", "GB/s", "ratio to native"], rows)


def _size_text(size: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def headline(log: Log) -> list[Row]:
    """Returns the other operations by XLA's own, at the largest array."""
    largest = max(r["bytes"] for r in log.of("all_reduce"))
    return [
        Row(
            f"all-reduce of {_size_text(largest)}, {replicas_text(r['replicas'])}",
            f"{r['operation']} / {BASELINE}",
            Ratio(**r["ratio"]),
        )
        for r in log.of("all_reduce")
        if r["bytes"] == largest and r["operation"] != BASELINE
    ]


BENCHMARK = Benchmark(
    name="collectives",
    question="What an all-reduce costs under each cross-device operation.",
    quick=QUICK,
    full=FULL,
    minutes=(0.4, 4),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
