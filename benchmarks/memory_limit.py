"""Whether a model trains whose state is 3 times what a device may hold.

    python -m benchmarks.memory_limit             measures, and prints JSON lines
    python -m benchmarks.memory_limit --report    also writes a dated report to benchmarks/reports/

A job of processes with two devices each trains a small model, which connects them and fills their pools.
Then the kernel gives each process no more memory than it has by now and for each device a third of the state
of the large model (``RLIMIT_DATA``, which counts what ``malloc`` takes, and so the buffers of XLA:CPU). In
it has to be all that training takes: shares of the state and of the gradients, activations, gathered layers,
what gloo sends, and the compiler. Mirrored, the same model is the control: it has to fail. Linux only.
"""

from __future__ import annotations

import gc
import math
import re
import resource
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._harness import Log, counted, table
from benchmarks._workloads import momentum
from distribute_jax.testing import LocalCluster

OURS, MIRRORED = "FullyShardedStrategy", "MultiWorkerMirroredStrategy"
TIMES = 3
"""The state is so many times what a device may take."""
LAYERS, BATCH, STEPS = 32, 32, 10
DEVICES = 2
SMALL = 64
"""Width of the model that is trained before the limit is set."""
HEAP = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Of glibc: what is freed and larger goes back to the kernel."""
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: [^.\n]*|[^:\n]*bad_alloc")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is trained."""

    cases: tuple[str, ...] = (OURS, MIRRORED)
    """The strategies."""
    processes: int = 4
    width: int = 1024


class Deep(nnx.Module):
    """Equal layers in a scan, rematerialised, so that one of them is whole at a time."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        # Not nnx.vmap, which draws the numbers of all layers at once.
        make: Any = nnx.scan(
            lambda rngs: nnx.Linear(width, width, use_bias=False, rngs=rngs), in_axes=0, out_axes=0
        )
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, width) to the same shape."""
        one: Any = nnx.remat(lambda h, layer: h + nnx.tanh(layer(h)) / LAYERS)
        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def made(width: int) -> tuple[Deep, nnx.Optimizer[Deep]]:
    """Makes model and optimizer."""
    model = Deep(width, nnx.Rngs(0))
    return model, nnx.Optimizer(model, momentum(), wrt=nnx.Param)


def losses_of(strategy: dj.Strategy, width: int, steps: int) -> list[float]:
    """Makes a model in place and trains it on one batch."""
    model, optimizer = strategy.create(partial(made, width))
    # Where a buffer is missing the error comes here; in a collective the others would wait for it.
    jax.block_until_ready(nnx.state((model, optimizer)))

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Deep) -> jax.Array:
            return dj.compute_average_loss(optax.squared_error(model(x), y).sum(axis=-1))

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        loss, gradients = dj.get_replica_context().all_reduce("sum", (loss, gradients))
        optimizer.update(model, gradients)
        return loss

    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((BATCH, width), np.float32) / width**0.5 for _ in range(2))
    data = strategy.distribute_dataset([(x, y)] * steps)
    return [float(strategy.run(step, args=batch)) for batch in data]


def state_bytes(width: int) -> int:
    """Counts what model and optimizer take in all."""
    leaves = jax.tree.leaves(nnx.eval_shape(partial(made, width)))
    return sum(x.size * x.dtype.itemsize for x in leaves)


def train(kind: str, width: int, room: int) -> dict[str, Any]:
    """Trains in one process of a job; ``room`` is what it may take beyond a small model."""
    resolver = dj.cluster_resolver.detect()
    strategy: dj.Strategy = getattr(dj, kind)(cluster_resolver=resolver)
    losses_of(strategy, SMALL, 2)
    gc.collect()
    data, resident, _ = memory()
    resource.setrlimit(resource.RLIMIT_DATA, (data + room,) * 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    losses = losses_of(strategy, width, STEPS)
    return {"losses": losses, "peak": memory()[2] - resident}


def memory() -> tuple[int, int, int]:
    """Returns the bytes of this process that the limit counts, those that are resident, and their peak."""
    text = Path("/proc/self/status").read_text()
    found = dict(re.findall(r"(\w+):\s+(\d+) kB", text))
    data, resident, peak = (1024 * int(found[name]) for name in ("VmData", "VmRSS", "VmHWM"))
    return data, resident, peak


def measure(options: Options) -> Log:
    """Trains every case in a job."""
    log = Log()
    log.start()
    state = state_bytes(options.width)
    room = DEVICES * state // TIMES
    for kind in options.cases:
        cluster = LocalCluster(options.processes, DEVICES, timeout=300, environment=HEAP)
        results = cluster.run(train, kind, options.width, room, check=False)
        trained = [result.value for result in results if not result.failed]
        whys = {m.group() for result in results for m in [OUT_OF_MEMORY.search(result.stderr)] if m}
        log.add(
            "memory_limit",
            strategy=kind,
            processes=options.processes,
            state=state,
            room=room,
            trained=len(trained),
            losses=trained[0]["losses"] if trained else [],
            peaks=[value["peak"] for value in trained],
            why=sorted(whys),
            ended=[] if trained else list(map(str, results)),
        )
    return log


def report(log: Log) -> str:
    """Writes the records as a page."""
    (*_, last) = log.of("memory_limit")
    parts = [
        "# A model of which a device may hold a third",
        f"{last['processes']} processes with {DEVICES} devices each train {STEPS} steps of a model of "
        f"{last['state'] / 1e6:.0f} MB: weights, and momentum of SGD. *Room* is what the kernel lets each "
        "process take beyond what it had after a small model: a third of that for each device, for all that "
        "training takes. "
        "*Peak* is the most that was resident beyond that, in each process that has trained.",
        table(
            ("", "room, MB", "processes that train", "peak, MB", "loss", "otherwise"),
            [
                (
                    r["strategy"],
                    f"{r['room'] / 1e6:.0f}",
                    f"{r['trained']} of {r['processes']}",
                    ", ".join(f"{peak / 1e6:.0f}" for peak in r["peaks"]),
                    " to ".join(f"{loss:.3f}" for loss in r["losses"][:: STEPS - 1]),
                    ", ".join(r["why"]),
                )
                for r in log.of("memory_limit")
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns whether each case went as it has to."""
    rows = []
    for r in log.of("memory_limit"):
        if r["strategy"] == MIRRORED:
            rows.append(Row("processes that train", MIRRORED, counted(r["trained"]), 0.0))
            continue
        fell = r["losses"][-1] / r["losses"][0] if r["losses"] else math.inf
        rows.append(Row("last loss / first", OURS, counted(fell), 0.99))
        rows.append(Row("peak / room", OURS, counted(max([*r["peaks"], 0]) / r["room"]), 1.0))
    return rows


BENCHMARK = Benchmark(
    name="memory_limit",
    question="Whether a model trains whose state is 3 times what a device may hold.",
    quick=Options(),
    full=Options(),
    minutes=(1.5, 1.5),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    sys.exit(any(row.met is False for row in main(BENCHMARK)))
