"""What a step costs over several processes, and what of it is the collective's.

    python -m benchmarks.scaling             measures, and prints JSON lines
    python -m benchmarks.scaling --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.scaling --quick     a minute's look: few rounds, wide intervals

For each layout of processes × devices a job of real processes is started on this machine. In it the step
under ``MultiWorkerMirroredStrategy.run`` takes turns with the same step written by hand for several
processes, and with that step without its all-reduce.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._harness import Log, Ratio, interval_text, ratio, table
from benchmarks._job_steps import ALONE, BY_HAND, RUN, times
from distribute_jax.testing import LocalCluster

TARGET = ((4, 1), 1.05)
"""In this layout ``run`` takes at most so many times as long as the step written by hand."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    layouts: tuple[tuple[int, int], ...] = (
        *((1, 1), (1, 2), (1, 4), (1, 8)),
        *((2, 1), (2, 2), (4, 1), (4, 2)),
    )
    """Processes, and devices of each."""
    batch: int = 256
    """Examples of the global batch where it stays the same (strong scaling)."""
    share: int = 64
    """Examples of each replica where that stays the same (weak scaling)."""
    kinds: tuple[str, ...] = ("strong", "weak")
    """Which of the two are measured."""
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""
    calls: int = 5
    """Steps in one turn."""

    def __post_init__(self) -> None:
        """Refuses numbers with which nothing would be measured."""
        if min(self.batch, self.share, self.rounds, self.calls) < 1 or not self.layouts:
            raise ValueError(f"{self}: every number is at least 1, and there is a layout.")
        if not set(self.kinds) <= {"strong", "weak"}:
            raise ValueError(f"{self}: the kinds are 'strong' and 'weak'.")
        if any(self.batch % (processes * devices) for processes, devices in self.layouts):
            raise ValueError(f"{self}: the batch is divided by the replicas of every layout.")


FULL = Options()
QUICK = Options(layouts=((1, 1), (2, 2)), kinds=("strong",), rounds=5, calls=2)


def measure(options: Options) -> Log:
    """Starts a job for each layout and kind of scaling."""
    log = Log()
    log.start()
    for scaling in options.kinds:
        for processes, devices in options.layouts:
            replicas = processes * devices
            batch = options.batch if scaling == "strong" else options.share * replicas
            cluster = LocalCluster(processes, devices, timeout=600)
            first = cluster.run(times, batch, options.rounds, options.calls)[0].value
            check_equal(first["losses"])
            log.add("step", scaling=scaling, processes=processes, devices=devices, batch=batch,
                    **figures(first["seconds"], batch))  # fmt: skip
    return log


def figures(seconds: dict[str, list[float]], batch: int) -> dict[str, Any]:
    """Turns the seconds of each way and round into what the report shows."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ms": {name: 1e3 * value for name, value in medians.items()},
        "examples_per_s": batch / medians[RUN],
        "collective": 1 - medians[ALONE] / medians[BY_HAND],
        "ratio": ratio(seconds[RUN], seconds[BY_HAND]),
    }


def check_equal(losses: dict[str, list[float]]) -> None:
    """Raises unless both ways train equally."""
    for ours, theirs in zip(losses[RUN], losses[BY_HAND], strict=True):
        if not math.isclose(ours, theirs, rel_tol=2e-5):
            raise ValueError(f"run and the step written by hand train differently: {losses}")


def report(log: Log) -> str:
    """Writes the records as a page."""
    (processes, devices), limit = TARGET
    parts = [
        "# A step over several processes",
        "MLP 784-512-10, Adam, float32, gloo on loopback; each step is waited for. The ratio is the median "
        "over the rounds of the time under `MultiWorkerMirroredStrategy.run` by that of the same step "
        "written by hand with `jit(shard_map)`, with its 95% interval; the target for "
        f"{processes} × {devices} is {limit}. The collective's share is what the step written by hand loses "
        "of its time without its all-reduce; below zero it is noise. More processes than cores wait for "
        "each other's turn inside the all-reduce, so the share is that of this machine, not of a network.",
    ]
    for scaling, words in (("strong", "one global batch"), ("weak", "one batch per replica")):
        records = [r for r in log.of("step") if r["scaling"] == scaling]
        if not records:
            continue
        parts += [f"## {scaling.capitalize()} scaling: {words}", _table(records)]
    return "\n\n".join(parts) + "\n"


def _table(records: list[dict[str, Any]]) -> str:
    first = records[0]["examples_per_s"]
    rows = [
        [
            f"{r['processes']} × {r['devices']}",
            r["batch"],
            f"{r['ms'][RUN]:.2f}",
            f"{r['ms'][BY_HAND]:.2f}",
            f"{100 * r['collective']:.0f} %",
            f"{r['examples_per_s'] / first:.2f}",
            interval_text(r["ratio"]),
        ]
        for r in records
    ]
    head = ["processes × devices", "batch", "run ms", "by hand ms", "collective"]
    return table([*head, "examples/s to the first row", "ratio to by hand"], rows)


def headline(log: Log) -> list[Row]:
    """Returns the step under ``run`` by the one written by hand, for every layout of several processes."""
    layout, limit = TARGET
    return [
        Row(
            f"step, {r['processes']} processes × {r['devices']}, {r['scaling']} scaling",
            f"{RUN} / {BY_HAND}",
            Ratio(**r["ratio"]),
            limit if (r["processes"], r["devices"]) == layout else None,
        )
        for r in log.of("step")
        if r["processes"] > 1
    ]


BENCHMARK = Benchmark(
    name="scaling",
    question="What a step costs over several processes.",
    quick=QUICK,
    full=FULL,
    minutes=(0.8, 5),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
