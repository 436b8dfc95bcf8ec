"""What a training step holds in memory on each replica, beside the same step written by hand.

    python -m benchmarks.memory             measures, and prints JSON lines
    python -m benchmarks.memory --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.memory --quick     without the largest model

Nothing is timed: the bytes are those that the compiler planned, and those of the arrays that are alive
after a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main, replicas_text, there
from benchmarks._harness import Log, counted, table
from benchmarks._inside import compiled_of
from benchmarks._plots import Bar, draw_bars
from benchmarks._steps import SHARD_MAP, flat_state, mesh_of, shard_map_parts, trained_under
from benchmarks._workloads import MLP, RESNET50, TRANSFORMER, Workload

MIRRORED, CENTRAL = "MirroredStrategy", "CentralStorageStrategy"
SHARDED = "MirroredStrategy(shard_optimizer_state=True)"
SHORT = {SHARD_MAP: "by hand", MIRRORED: "mirrored", SHARDED: "sharded state", CENTRAL: "central"}
"""Below the bars."""
PLANNED = {
    "arguments": "argument_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}
"""What the compiler says of a program, for each replica."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    cases: tuple[tuple[Workload, int], ...] = (
        *((MLP, 4), (TRANSFORMER, 4), (RESNET50, 4)),
        *((TRANSFORMER, 1), (RESNET50, 1)),
    )
    """Workload and number of replicas; those that need more devices than there are stay out."""

    def __post_init__(self) -> None:
        """Refuses to measure nothing."""
        if not self.cases:
            raise ValueError(f"{self}: there is at least one case.")


FULL = Options()
QUICK = Options(cases=FULL.cases[:2])


@dataclass(frozen=True)
class Held:
    """Bytes of live arrays on each device."""

    params: Counter[jax.Device]
    optimizer: Counter[jax.Device]


def measure(options: Options) -> Log:
    """Counts for every case and column."""
    log = Log()
    log.start()
    for work, replicas in there(options.cases, lambda case: case[1]):
        for name, count in COLUMNS.items():
            facts = {"workload": work.name, "replicas": replicas, "column": name}
            log.add("memory", **facts, **count(work, replicas))
    return log


def by_hand(work: Workload, replicas: int) -> dict[str, Any]:
    """Counts the hand-written step over flat arrays."""
    jitted, state, batch = shard_map_parts(work, mesh_of(replicas))
    compiled = jitted.lower(*state, *batch).compile()
    *state, _ = compiled(*state, *batch)
    params, optimizer, _ = jax.tree.unflatten(flat_state(work)[1], state)
    return {**planned(compiled), **alive(Held(bytes_of(params), bytes_of(optimizer)), replicas)}


def under(strategy: dj.Strategy, work: Workload) -> dict[str, Any]:
    """Counts the step under a strategy."""
    trained = trained_under(strategy, work)
    program = planned(compiled_of(trained))
    jax.block_until_ready(jax.tree.leaves(trained.run()))
    held = Held(bytes_of(nnx.state(trained.model)), bytes_of(nnx.state(trained.optimizer)))
    return {**program, **alive(held, strategy.num_replicas_in_sync)}


def mirrored(work: Workload, replicas: int) -> dict[str, Any]:
    """Counts under ``MirroredStrategy``."""
    return under(dj.MirroredStrategy(list(range(replicas))), work)


def sharded(work: Workload, replicas: int) -> dict[str, Any]:
    """Counts where each replica keeps its share of the optimizer state."""
    return under(dj.MirroredStrategy(list(range(replicas)), shard_optimizer_state=True), work)


def central(work: Workload, replicas: int) -> dict[str, Any]:
    """Counts where one device keeps the state, apart from the replicas where there is one more."""
    home = replicas if jax.device_count() > replicas else 0
    return under(dj.CentralStorageStrategy(list(range(replicas)), home), work)


COLUMNS: dict[str, Callable[[Workload, int], dict[str, Any]]] = {
    SHARD_MAP: by_hand,
    MIRRORED: mirrored,
    SHARDED: sharded,
    CENTRAL: central,
}


def planned(compiled: Any) -> dict[str, int | None]:
    """Returns what the compiler planned; None where several programs make a step, or it does not say."""
    analysis = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    return {name: getattr(analysis, field, None) for name, field in PLANNED.items()}


def bytes_of(tree: Any) -> Counter[jax.Device]:
    """Adds up the bytes of a tree's arrays on each device."""
    found: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


def alive(held: Held, replicas: int) -> dict[str, int]:
    """Returns the bytes on the replica that holds most, and on any one device besides."""
    inside = jax.devices()[:replicas]
    outside = [device for device in jax.devices() if device not in inside]
    return {
        "params": max(held.params[device] for device in inside),
        "optimizer": max(held.optimizer[device] for device in inside),
        "elsewhere": max((held.params[d] + held.optimizer[d] for d in outside), default=0),
    }


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# Memory of a step",
        "In MiB for each replica. The compiler plans *arguments* (state and batch), of which *aliased* "
        "are updated in place, and *temporaries*; *peak* is what XLA calls so, on CPU without temporaries. "
        "After a step, *params* and *optimizer* are what its arrays hold on the replica that holds most, "
        "and *elsewhere* what one device holds that is not a replica. A central strategy sends its state to "
        "the replicas for each step, so that there is no one program to plan for.",
    ]
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in log.of("memory"):
        cases.setdefault((record["workload"], record["replicas"]), []).append(record)
    for (workload, replicas), records in cases.items():
        parts += [f"## {workload}, {replicas_text(replicas)}", _table(records)]
    return "\n\n".join(parts) + "\n"


HELD = ("params", "optimizer", "elsewhere")


def _table(records: list[dict[str, Any]]) -> str:
    names = (*PLANNED, *HELD)
    rows = [[r["column"], *(_mib(r[name]) for name in names)] for r in records]
    return table(["", *names], rows)


def _mib(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**20:.2f}"


def headline(log: Log) -> list[Row]:
    """Returns the peak of ours by the hand-written one, and the share of optimizer state that is kept."""
    found = {(r["workload"], r["replicas"], r["column"]): r for r in log.of("memory")}
    rows = []
    for (workload, replicas, column), ours in found.items():
        case = f"{workload}, {replicas_text(replicas)}"
        plain = found[workload, replicas, SHARD_MAP]
        if column == MIRRORED and ours["arguments"] is not None:
            share = counted(_needed(ours) / _needed(plain))
            rows.append(Row(f"memory of a step, {case}", f"{column} / {SHARD_MAP}", share, 1.0))
        if column == SHARDED:
            share = counted(ours["optimizer"] / plain["optimizer"])
            rows.append(Row(f"optimizer state, {case}", f"{column} / {SHARD_MAP}", share))
    return rows


def _needed(record: Mapping[str, Any]) -> int:
    """Returns what a step needs in all: what it is given, and what it computes with."""
    return int(record["arguments"] + record["temporaries"])


def draw(log: Log, path: Path) -> None:
    """Draws what each replica holds between steps, what a step needs, and what is stored elsewhere."""
    bars = [
        Bar(
            f"{r['workload']}, {replicas_text(r['replicas'])}",
            SHORT[r["column"]],
            {k: (r[k] or 0) / 2**20 for k in ("params", "optimizer", "temporaries", "elsewhere")},
        )
        for r in log.of("memory")
    ]
    draw_bars(bars, path, y="MiB on a replica, or elsewhere")


BENCHMARK = Benchmark(
    name="memory",
    question="What a training step holds in memory on each replica.",
    quick=QUICK,
    full=FULL,
    minutes=(0.4, 4),
    measure=measure,
    report=report,
    headline=headline,
    draw=draw,
)

if __name__ == "__main__":
    main(BENCHMARK)
