"""What parameter servers cost beside loops written by hand, and what staleness buys.

    python -m benchmarks.servers             measures, and prints JSON lines
    python -m benchmarks.servers --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.servers --quick     a minute's look: few rounds, wide intervals

The loop by hand has as many threads: each takes the weights under a lock, computes gradients, and updates
weights and moments under the lock. It numbers nothing, bounds nothing, and loses a batch with its thread.
Beside servers in other processes, and with Ray where it is installed, a socket only echoes as many numbers.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._harness import Log, Ratio, in_turns, interval_text, ratio, table
from distribute_jax.servers._engines import _ForkServer
from distribute_jax.servers._ray import Cluster, _Calls
from distribute_jax.servers._wire import Connection, Message

CLOSURES, BY_HAND, SOCKET = "closures", "by hand", "a plain socket"
RATIO, MICROSECONDS, TWICE = 1.05, 150, 0.5
"""The targets: of steps of some milliseconds, of an empty closure, of staleness 4 by staleness 1."""
TRANSFERS = {1: 1.0, 100: 150.0}
"""Milliseconds in which so many MB are read of a server that is a process, and handed to it."""
SOME = 4.0
"""Milliseconds of a step by hand for which the first target holds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network of three layers, and its batch."""

    width: int
    batch: int
    calls: int
    """Steps in one turn."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    cases: tuple[Case, ...] = (
        Case(width=512, batch=64, calls=60),
        Case(width=512, batch=256, calls=30),
        Case(width=1024, batch=256, calls=12),
    )
    workers: tuple[int, ...] = (1, 2)
    staleness: tuple[int, ...] = (1, 0, 4, 16)
    """The bounds with one slow worker; the first is what the others are compared with."""
    seconds: tuple[float, float] = (0.05, 0.005)
    """What a step of each of its two workers takes."""
    empty: int = 300
    """Empty closures in one turn."""
    slow: int = 60
    """Steps in one turn with a slow worker."""
    engines: tuple[str, ...] = ("processes", "ray") if find_spec("ray") else ("processes",)
    """The servers that numbers are read of and handed to."""
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""

    def __post_init__(self) -> None:
        """Refuses numbers with which nothing would be measured."""
        if min(self.rounds, self.empty, *self.workers) < 1:
            raise ValueError(f"{self}: every number is at least 1.")


FULL = Options()
QUICK = Options(cases=(Case(width=512, batch=64, calls=20),), rounds=5, empty=100)


def measure(options: Options) -> Log:
    """Times closures of steps and of nothing, and with a slow worker."""
    log = Log()
    log.start()
    for case in options.cases:
        for workers in options.workers:
            turns = {CLOSURES: closures(case, workers), BY_HAND: by_hand(case, workers)}
            timings = timed(turns, case.calls, options.rounds)
            log.add("step", **vars(case), workers=workers, ratio=ratio(timings[CLOSURES], timings[BY_HAND]),
                    ms={name: 1e3 * statistics.median(times) for name, times in timings.items()})  # fmt: skip
    for workers in options.workers:
        times = timed({CLOSURES: nothing(workers)}, options.empty, options.rounds)[CLOSURES]
        log.add("empty", workers=workers, us=1e6 * statistics.median(times),
                ratio=ratio(times, [MICROSECONDS / 1e6] * len(times)))  # fmt: skip
    turns = {str(bound): with_a_slow_worker(bound, options.seconds) for bound in options.staleness}
    timings = timed(turns, options.slow, options.rounds)
    for bound, times in timings.items():
        log.add("staleness", bound=bound, rate=1 / statistics.median(times),
                ratio=ratio(times, timings[str(options.staleness[0])]))  # fmt: skip
    for size, target in TRANSFERS.items():
        with ExitStack() as started:
            turns = {
                way: started.enter_context(of_server(way, size << 20)) for way in options.engines
            }
            turns[SOCKET] = started.enter_context(of_socket(size << 20))
            timings = timed(turns, max(1, 64 // size), options.rounds)
        for way, times in timings.items():
            log.add("transfer", way=way, size=size, ms=1e3 * statistics.median(times),
                    ratio=ratio(times, [target / 1e3] * len(times)),
                    by_socket=ratio(times, timings[SOCKET]))  # fmt: skip
    return log


Turn = Callable[[int], None]
"""Runs so many steps, and waits for them."""


def timed(turns: dict[str, Turn], calls: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a step in each way and round."""

    def seconds(turn: Turn) -> float:
        start = time.perf_counter()
        turn(calls)
        return (time.perf_counter() - start) / calls

    for turn in turns.values():
        turn(calls)
    return in_turns({name: partial(seconds, turn) for name, turn in turns.items()}, rounds)


def network(width: int) -> nnx.Module:
    """Returns three layers."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(width, width, rngs=rngs) for _ in range(2)]
    return nnx.Sequential(layers[0], nnx.relu, layers[1], nnx.relu, nnx.Linear(width, 1, rngs=rngs))


def scheduling(coordinator: Any, fn: Callable[..., Any], *args: Any) -> Turn:
    """Returns what schedules a function so many times, and joins."""

    def turn(calls: int) -> None:
        for _ in range(calls):
            coordinator.schedule(fn, args=args)
        coordinator.join()

    return turn


def closures(case: Case, workers: int) -> Turn:
    """Returns training by scheduled closures."""
    strategy = dj.ParameterServerStrategy(workers=workers)
    with strategy.scope():
        model = network(case.width)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))
        return loss

    batch = jnp.ones((case.batch, case.width))
    return scheduling(dj.coordinator.ClusterCoordinator(strategy), step, batch)


def by_hand(case: Case, workers: int) -> Turn:
    """Returns the same training by threads and a lock."""
    whole: Any = nnx.split(network(case.width), nnx.Param, ...)
    graph, params, rest = whole
    optimizer, batch = optax.adam(1e-3), jnp.ones((case.batch, case.width))
    loss_of = lambda p, x: (nnx.merge(graph, p, rest)(x) ** 2).mean()  # noqa: E731
    gradients = jax.jit(jax.value_and_grad(loss_of))

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    now, lock = [params, optimizer.init(params)], threading.Lock()

    def work(calls: int) -> None:
        for _ in range(calls):
            with lock:
                params = now[0]
            _, grads = jax.block_until_ready(gradients(params, batch))
            with lock:
                now[:] = update(*now, grads)

    def turn(calls: int) -> None:
        parts = [calls // workers + (i < calls % workers) for i in range(workers)]
        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        jax.block_until_ready(now)

    return turn


def nothing(workers: int) -> Turn:
    """Returns closures that add one to a number."""
    strategy = dj.ParameterServerStrategy(workers=workers)
    with strategy.scope():
        total = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)
    return scheduling(dj.coordinator.ClusterCoordinator(strategy), lambda: total.assign_add(1))


def with_a_slow_worker(bound: int, seconds: tuple[float, float]) -> Turn:
    """Returns closures of two workers whose steps take so long, at most so stale."""
    strategy = dj.ParameterServerStrategy(workers=2, max_staleness=bound)
    coordinator = dj.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def dataset() -> Iterator[np.ndarray[Any, Any]]:
        worker = dj.coordinator.experimental_get_current_worker_index()
        while True:
            time.sleep(seconds[worker])
            yield np.ones((), np.float32)

    def step(elements: Any) -> None:
        total.assign_add(next(elements))

    return scheduling(coordinator, step, iter(coordinator.create_per_worker_dataset(dataset)))


@contextmanager
def of_server(engine: str, size: int) -> Iterator[Turn]:
    """Yields what reads so many bytes of a server in another process, and hands it as many."""
    engines: Any = Cluster() if engine == "ray" else _ForkServer("cpu")
    server = engines.child("server", 0)
    if engine == "ray":
        link: Any = _Calls(server._actor)
    else:
        here, there = socket.socketpair()
        with there:
            server.send(Message("link", ends=[there.fileno()]))
        link = Connection(here)
    data, runs = np.ones(size, np.uint8), itertools.count()
    server.send(Message("assign", [[0]], [data]))

    def turn(calls: int) -> None:
        for run in itertools.islice(runs, calls):
            server.send(Message("prepare", [run, [0]]))
            (read,) = link.request(Message("fetch", [0, run, []]))().arrays
            assert read.size == size
            # Of an earlier epoch, so that the server does not keep it.
            link.request(Message("stage", [-1, run, ""], [data]))()

    yield turn
    link.close()
    server.end()
    engines.close()


ECHO = """
import socket, sys
end, data = socket.socket(fileno=int(sys.argv[1])), memoryview(bytearray(int(sys.argv[2])))
while True:
    left = data
    while left:
        left = left[end.recv_into(left) or sys.exit() :]
    end.sendall(data)
"""


@contextmanager
def of_socket(size: int) -> Iterator[Turn]:
    """Yields what sends so many bytes to another process, which sends them back."""
    here, there = socket.socketpair()
    command = [sys.executable, "-c", ECHO, str(there.fileno()), str(size)]
    with subprocess.Popen(command, pass_fds=[there.fileno()]), here:
        there.close()
        data = memoryview(bytearray(size))

        def turn(calls: int) -> None:
            for _ in range(calls):
                here.sendall(data)
                left = data
                while left:
                    left = left[here.recv_into(left) :]

        yield turn


def report(log: Log) -> str:
    """Writes the records as a page."""
    steps = [
        [r["width"], r["batch"], r["workers"], f"{r['ms'][CLOSURES]:.2f}", f"{r['ms'][BY_HAND]:.2f}",
         interval_text(r["ratio"])]
        for r in log.of("step")
    ]  # fmt: skip
    empty = [[r["workers"], f"{r['us']:.0f}"] for r in log.of("empty")]
    stale = [
        [r["bound"], f"{r['rate']:.0f}", interval_text(r["ratio"])] for r in log.of("staleness")
    ]
    transfers = [
        [r["size"], r["way"], f"{r['ms']:.2f}", interval_text(r["by_socket"])]
        for r in log.of("transfer")
    ]
    parts = [
        "# Parameter servers",
        "Three layers, Adam, float32, workers that are threads on one device. The ratio is the median over "
        "the rounds of the time of a step by closures by that of threads with a lock, written by hand, with "
        f"its 95% interval; the target is {RATIO} for steps of {SOME:.0f} ms and more.",
        table(["width", "batch", "workers", "closures ms", "by hand ms", "ratio"], steps),
        f"A closure that only adds one to a number; the target is {MICROSECONDS} µs.",
        table(["workers", "µs"], empty),
        "Two workers, of which one takes ten times as long. The ratio is that of the times of a step to "
        f"those with the first bound; the target is {TWICE} for a bound of 4.",
        table(["max_staleness", "steps/s", "ratio of times"], stale),
        "What a worker reads of a server in another process and hands to it, and as much over a socket that "
        "only echoes it. The targets of processes are "
        + " and ".join(f"{ms:.0f} ms for {size} MB" for size, ms in TRANSFERS.items())
        + ".",
        table(["MB", "way", "ms", "ratio to the socket"], transfers),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the steps by those by hand, the empty closure by its target, and what staleness buys."""
    rows = [
        Row(
            f"a step of {r['ms'][BY_HAND]:.0f} ms, {r['workers']} workers",
            f"{CLOSURES} / {BY_HAND}",
            Ratio(**r["ratio"]),
            RATIO if r["ms"][BY_HAND] >= SOME else None,
        )
        for r in log.of("step")
    ]
    rows += [
        Row(
            f"an empty closure, {r['workers']} workers",
            f"µs / {MICROSECONDS}",
            Ratio(**r["ratio"]),
            1.0,
        )
        for r in log.of("empty")
    ]
    rows += [
        Row(
            f"{r['size']} MB read and handed over, {r['way']}",
            f"ms / {TRANSFERS[r['size']]:.0f}",
            Ratio(**r["ratio"]),
            1.0 if r["way"] == "processes" else None,
        )
        for r in log.of("transfer")
    ]
    of_stale = list(log.of("staleness"))
    return rows + [
        Row(
            "a step with one slow worker",
            f"staleness {r['bound']} / {of_stale[0]['bound']}",
            Ratio(**r["ratio"]),
            TWICE if r["bound"] == "4" else None,
        )
        for r in of_stale[1:]
    ]


BENCHMARK = Benchmark(
    name="servers",
    question="What closures and transfers cost, and what staleness buys with a slow worker.",
    quick=QUICK,
    full=FULL,
    minutes=(1, 8),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
