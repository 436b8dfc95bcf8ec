"""What dividing a model over the replicas takes and costs, beside the same division written by hand.

    python -m benchmarks.sharded             measures, and prints JSON lines
    python -m benchmarks.sharded --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.sharded --quick     without the transformers that scan

All columns train the same model on the same batch, and those of shares divide each array along the same
dim. Bytes are those that the compiler planned, bits are compared after a few steps, and the times are of
steps in turns. The command fails where a target is not met.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import distribute_jax as dj
from benchmarks import _workloads as workloads
from benchmarks._benchmark import ROW_HEAD, Benchmark, Row, main, replicas_text, there
from benchmarks._harness import (
    Log,
    Ratio,
    calls_within,
    counted,
    interleaved,
    interval_text,
    ratio,
    table,
)
from benchmarks._inside import KINDS, collectives_of, entry_of
from benchmarks._steps import Step, mesh_of, placed, trained_under
from benchmarks._workloads import (
    Workload,
    example_losses,
    momentum,
    perceptron,
    tied_transformer,
)

MIRRORED, SHARDED_UPDATE = "mirrored", "sharded update"
OURS, HAND, GUIDE = "FullyShardedStrategy", "jit by hand", "Flax guide, nnx.jit"
AGAIN = "reshard_after_forward=True"


# Batches are so large that activations take more bytes than weights: else XLA sends those of `jit by hand`.
SIZES = (256, 1024, 256, 1024, 256, 64)
MLP = replace(perceptron("MLP 256–1024", SIZES, batch=2048), optimizer=momentum)
CNN = replace(workloads.CNN, batch=256, optimizer=momentum)
LOOP, SCAN, REMAT = map(tied_transformer, ("loop", "scan", "remat"))
TIMED = (SCAN.name, CNN.name)
"""Those whose time has a target."""
UNTIMED_ROUNDS = 6
"""Rounds of the others."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    cases: tuple[tuple[Workload, int], ...] = tuple((w, 8) for w in (MLP, CNN, LOOP, SCAN, REMAT))
    """Workload and number of replicas; those that need more devices than there are stay out."""
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""
    turn: float = 0.3
    """Seconds after which a turn has enough steps."""
    steps: int = 4
    """Steps after which bits are compared."""

    def __post_init__(self) -> None:
        """Refuses counts with which nothing would be measured."""
        if min(self.rounds, self.steps) < 1 or not self.cases:
            raise ValueError(f"{self}: every count is at least 1, and there is at least one case.")


FULL = Options()
QUICK = Options(cases=FULL.cases[:2], rounds=6)


@dataclass(frozen=True)
class Column:
    """One way to train a workload; its first step is done."""

    step: Step
    compiled: Any
    state: Callable[[], Any]
    """Reads model and optimizer as they are now."""
    lowered: str = ""
    """The program before the compiler, where that has collectives."""


def under(strategy: dj.Strategy, work: Workload) -> Column:
    """Trains under a strategy."""
    trained = trained_under(strategy, work)
    jax.block_until_ready(trained.run())
    program = entry_of(trained)[0].program
    step, lowered = program.step, ""
    if isinstance(strategy, dj.FullyShardedStrategy):
        lowered = jax.jit(step.function).lower(*step.avals).as_text()
    both = (trained.model, trained.optimizer)
    return Column(trained.run, program.compiled, lambda: nnx.state(both), lowered)


def columns_of(work: Workload, replicas: int) -> dict[str, Column]:
    """Makes all columns."""
    devices = list(range(replicas))
    ours = under(dj.FullyShardedStrategy(devices), work)
    where = jax.tree.map(_sharding, ours.state())
    return {
        MIRRORED: under(dj.MirroredStrategy(devices), work),
        SHARDED_UPDATE: under(dj.MirroredStrategy(devices, shard_optimizer_state=True), work),
        OURS: ours,
        AGAIN: under(dj.FullyShardedStrategy(devices, reshard_after_forward=True), work),
        HAND: by_hand(work, replicas, where),
        GUIDE: by_guide(work, replicas, where),
    }


def _update(work: Workload, model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The step over the global batch, as JAX and Flax have it."""

    def loss_fn(model: Any) -> jax.Array:
        return example_losses(model(x), y).sum() / work.batch

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def by_hand(work: Workload, replicas: int, where: Any) -> Column:
    """Writes the step as ``jit`` over shardings that are given, with donated state."""
    mesh = mesh_of(replicas)
    model = work.model(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, work.optimizer(), wrt=nnx.Param)))
    split = NamedSharding(mesh, P("data"))

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = _update(work, model, optimizer, x, y)
        return nnx.state((model, optimizer)), loss

    batch = [placed(part, split) for part in work.first_batch()]
    held = [jax.device_put(state, where)]
    jitted = jax.jit(
        step,
        in_shardings=(where, split, split),
        out_shardings=(where, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    compiled = jitted.lower(held[0], *batch).compile()

    def run() -> jax.Array:
        held[0], loss = compiled(held[0], *batch)
        return loss

    jax.block_until_ready(run())
    return Column(run, compiled, lambda: held[0])


def by_guide(work: Workload, replicas: int, where: Any) -> Column:
    """Writes the step as Flax's guide to several devices does: state is constrained where it is made."""
    mesh = mesh_of(replicas)

    @nnx.jit
    def create() -> Any:
        model = work.model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, work.optimizer(), wrt=nnx.Param)
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, where))
        return model, optimizer

    train_step = nnx.jit(partial(_update, work))
    split = NamedSharding(mesh, P("data"))
    batch = [placed(part, split) for part in work.first_batch()]
    with jax.set_mesh(mesh):
        both = create()
        compiled = train_step.lower(*both, *batch).compile()

    def run() -> jax.Array:
        with jax.set_mesh(mesh):
            return train_step(*both, *batch)

    jax.block_until_ready(run())
    return Column(run, compiled, lambda: nnx.state(both))


def _sharding(leaf: jax.Array) -> Any:
    return leaf.sharding


def measure(options: Options) -> Log:
    """Counts and times every case."""
    log = Log()
    log.start()
    for work, replicas in there(options.cases, lambda case: case[1]):
        columns = columns_of(work, replicas)
        for column in columns.values():
            for _ in range(options.steps - 1):
                jax.block_until_ready(column.step())
        same = columns[MIRRORED].state()
        facts = {
            name: {**planned(column), **held(column), "bits": differing_bits(column.state(), same)}
            for name, column in columns.items()
        }
        steps = {name: column.step for name, column in columns.items()}
        calls = calls_within(options.turn, steps[HAND], 50, least=1)
        rounds = options.rounds if work.name in TIMED else min(options.rounds, UNTIMED_ROUNDS)
        timings = interleaved(steps, rounds=rounds, calls=calls)
        for name, times in timings.items():
            facts[name] |= {
                "ms": 1e3 * statistics.median(times),
                "ratio": ratio(times, timings[HAND]),
            }
            log.add("sharded", workload=work.name, replicas=replicas, column=name, **facts[name])
    return log


def planned(column: Column) -> dict[str, Any]:
    """Returns what the compiler planned for each device: bytes, and collectives with count and bytes."""
    memory, moved = (
        column.compiled.memory_analysis(),
        list(collectives_of(column.compiled.as_text())),
    )
    count, size = Counter[str](), Counter[str]()
    for kind, times, each in moved:
        count[kind] += times
        size[kind] += times * each
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "collectives": {kind: [count[kind], size[kind]] for kind in KINDS if count[kind]},
        "largest_all_reduce": max((b for kind, _, b in moved if kind == "all-reduce"), default=0),
        "written": Counter(re.findall(r"stablehlo\.(all_gather|reduce_scatter)\b", column.lowered)),
    }


def held(column: Column) -> dict[str, int]:
    """Returns the bytes of state that stays whole on each device, and of parameters that do not."""
    state = column.state()
    leaves = jax.tree.leaves(state)
    parameters = jax.tree.leaves(nnx.filter_state(state, nnx.Param))
    return {
        "whole": sum(x.nbytes for x in leaves if x.is_fully_replicated),
        "gradients": sum(x.nbytes for x in parameters if not x.is_fully_replicated),
    }


def differing_bits(a: Any, b: Any) -> int:
    """Counts the bits in which two states differ."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    bits = [[np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in pair] for pair in pairs]
    return int(sum(np.unpackbits(x ^ y).sum() for x, y in bits))


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# State that the replicas divide",
        "MiB on each device, as the compiler planned them. A collective is counted, and its result's bytes "
        "on each device, as often as a step does it: those in a loop in each round. *Written* are the "
        "gathers and scattered sums of the program before the compiler, loop bodies once; XLA of JAX "
        "0.10.2 merges gathers of the forward and the backward pass on CPU. *Bits* are those in which "
        "model and optimizer differ from mirrored ones after a few steps of SGD with momentum; for `jit` "
        "the sum of the gradients has another order. The ratio is the median over the rounds of the time "
        f"of a step by that of `{HAND}`, with its 95% interval.",
    ]
    for (workload, replicas), found in _cases(log).items():
        rows = list(map(_cells, found.values()))
        parts += [f"## {workload}, {replicas_text(replicas)}", table(_HEAD, rows)]
    targets = table(ROW_HEAD, [row.cells for row in headline(log)])
    return "\n\n".join([*parts, "## Targets", targets]) + "\n"


_HEAD = ("", "arguments", "temporaries", *KINDS, "written", "bits", "ms", "ratio")


def _cases(log: Log) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for r in log.of("sharded"):
        cases.setdefault((r["workload"], r["replicas"]), {})[r["column"]] = r
    return cases


def _cells(r: Mapping[str, Any]) -> list[str]:
    moved = [r["collectives"].get(kind) for kind in KINDS]
    return [
        r["column"],
        *(f"{r[name] / 2**20:.2f}" for name in ("arguments", "temporaries")),
        *(f"{pair[0]}: {pair[1] / 2**20:.2f}" if pair else "" for pair in moved),
        " + ".join(str(n) for n in r["written"].values()),
        str(r["bits"]),
        f"{r['ms']:.1f}",
        interval_text(r["ratio"]),
    ]


def headline(log: Log) -> list[Row]:
    """Returns each target of each case, with what was measured."""
    return [
        Row(f"{question}, {workload}", column, value, target)
        for (workload, replicas), found in _cases(log).items()
        for question, column, value, target in _targets(replicas, found)
    ]


def _targets(
    replicas: int, found: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, Ratio, float | None]]:
    same, ours, hand = found[MIRRORED], found[OURS], found[HAND]
    moved = {kind: size for kind, (_, size) in ours["collectives"].items()}
    batch = same["arguments"] - same["whole"]
    least = same["whole"] / replicas + ours["whole"] + batch
    yield "arguments", f"{OURS} / what it has to take", counted(ours["arguments"] / least), 1.02
    share, remat = ours["temporaries"] / same["temporaries"], ours["workload"] == REMAT.name
    yield "temporaries", f"{OURS} / {MIRRORED}", counted(share), 0.5 if remat else None
    for name, limit in ((OURS, 1.0), (AGAIN, None)):
        gathered = _gathered(found[name]) / _gathered(hand)
        yield "bytes gathered", f"{name} / {HAND}", counted(gathered), limit
        temporaries = found[name]["temporaries"] / hand["temporaries"]
        yield "temporaries", f"{name} / {HAND}", counted(temporaries), limit
    yield "bytes sent in all", f"{OURS} / {HAND}", counted(_sent(ours) / _sent(hand)), None
    summed = abs(moved.get("reduce-scatter", 0) / (ours["gradients"] / replicas) - 1)
    yield "bytes of sums", f"{OURS} beyond its share of gradients", counted(summed), 0.01
    yield "largest all-reduce", f"{OURS}, MB", counted(ours["largest_all_reduce"] / 1e6), 0.1
    others = moved.get("all-to-all", 0) + moved.get("collective-permute", 0)
    yield "other collectives", f"{OURS}, bytes", counted(others), 0.0
    yield "bits", f"{OURS} unlike {MIRRORED}", counted(ours["bits"]), 0.0
    limit = 1.05 if ours["workload"] in TIMED else None
    yield "time of a step", f"{OURS} / {HAND}", Ratio(**ours["ratio"]), limit


def _gathered(r: Mapping[str, Any]) -> int:
    return int(r["collectives"].get("all-gather", [0, 1])[1])


def _sent(r: Mapping[str, Any]) -> float:
    """Returns the bytes that each device sends at least, by the bytes of the results of collectives."""
    n = r["replicas"]
    times = {"reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
    moved = r["collectives"].items()
    return float(sum(times.get(kind, (n - 1) / n) * size for kind, (_, size) in moved))


BENCHMARK = Benchmark(
    name="sharded",
    question="What dividing a model over the replicas takes and costs.",
    quick=QUICK,
    full=FULL,
    minutes=(2, 12),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    sys.exit(any(row.met is False for row in main(BENCHMARK)))
