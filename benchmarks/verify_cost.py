"""What the comparison with one device costs: the first call of a step with and without it.

    python -m benchmarks.verify_cost             measures, and prints JSON lines
    python -m benchmarks.verify_cost --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.verify_cost --quick     a minute's look: few rounds, wide intervals

The first call traces, proves, compiles and runs the step. The comparison also compiles and runs it for one
device, and in float64 if float32 does not decide; a step with dropout is compiled for the replicas once more,
with equal masks, and one with batch norm runs on a batch with equal shares. Each call is made with a new
model and empty caches. Later calls are not compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main, there
from benchmarks._harness import Log, Ratio, in_turns, interval_text, ratio, table
from benchmarks._steps import mirrored
from benchmarks._workloads import CNN, DEEP, MLP, TRANSFORMER, Workload

OFF, AUTO = "verify off", "verify auto"
FLOAT64 = " (decided in float64)"
DROPOUT = " (with dropout)"
BATCH_NORM = " (with batch norm)"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, and how often its first call is measured."""

    work: Workload
    replicas: int = 4
    rounds: int = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    cases: tuple[Case, ...] = (
        Case(work=MLP),
        Case(work=DEEP),
        Case(work=CNN, rounds=5),
        Case(work=TRANSFORMER, rounds=5),
    )

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        if min(case.rounds for case in self.cases) < 1:
            raise ValueError(f"{self}: every count is at least 1.")


FULL = Options()
QUICK = Options(cases=(Case(work=MLP, rounds=4), Case(work=CNN, rounds=4)))


def tiny_steps() -> optax.GradientTransformation:
    """An optimizer whose first change is hardly larger than the rounding of the weights."""
    return optax.sgd(1e-7)


def with_layer(work: Workload, layer: Callable[[nnx.Rngs], nnx.Module]) -> Workload:
    """Returns a workload with a layer after the model, so that any kind of input will do."""

    def model(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(work.model(rngs), layer(rngs))

    return Workload(**{**vars(work), "model": model})


class BatchNorm(nnx.Module):
    """Batch norm of one channel, for outputs of any shape."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises all numbers together."""
        return self.norm(x[..., None])[..., 0]


def measure(options: Options) -> Log:
    """Times the first calls of every case, in turns."""
    log = Log()
    log.start()
    for case in there(options.cases, lambda case: case.replicas):
        tiny = Workload(**{**vars(case.work), "optimizer": tiny_steps})
        works = {
            "": case.work,
            FLOAT64: tiny,
            DROPOUT: with_layer(case.work, lambda rngs: nnx.Dropout(0.1, rngs=rngs)),
            BATCH_NORM: with_layer(case.work, BatchNorm),
        }
        for name, work in ((case.work.name + suffix, work) for suffix, work in works.items()):
            calls = {
                OFF: partial(first_call_seconds, work, case.replicas, "off"),
                AUTO: partial(first_call_seconds, work, case.replicas, "auto"),
            }
            timings = in_turns(calls, case.rounds)
            for column, times in timings.items():
                log.add(
                    "first call", workload=name, replicas=case.replicas, column=column,
                    ms=1e3 * statistics.median(times), ratio=ratio(times, timings[OFF]),
                )  # fmt: skip
    return log


def first_call_seconds(work: Workload, replicas: int, verify: Any) -> float:
    """Times the first call of a new model's step, until its result is ready."""
    trained = mirrored(work, replicas)
    jax.block_until_ready(jax.tree.leaves(trained.batch))
    jax.clear_caches()
    start = time.perf_counter()
    options = dj.RunOptions(verify=verify)
    jax.block_until_ready(trained.strategy.run(trained.step, args=trained.batch, options=options))
    return time.perf_counter() - start


def report(log: Log) -> str:
    """Writes the records as a page."""
    rows = [
        [r["workload"], r["replicas"], r["column"], f"{r['ms']:.0f}", interval_text(r["ratio"]),
         r["ratio"]["rounds"]]
        for r in log.of("first call")
    ]  # fmt: skip
    parts = [
        "# The cost of the comparison with one device",
        "The first call of a training step, in ms: tracing, proving, compiling and running it; with the "
        "comparison also for one device with the whole batch. Each call with a new model and empty caches. "
        "The ratio to the time without the comparison is the median over the rounds, with its 95% "
        "interval. Later calls are not compared, and cost the same with and without.",
        table(["workload", "replicas", "first call", "ms", "ratio", "rounds"], rows),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the ratios of the default."""
    return [
        Row(f"first call of a step, {r['workload']}", r["column"], Ratio(**r["ratio"]))
        for r in log.of("first call")
        if r["column"] == AUTO
    ]


BENCHMARK = Benchmark(
    name="verify_cost",
    question="What the comparison with one device adds to the first call of a step.",
    quick=QUICK,
    full=FULL,
    minutes=(1, 10),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
