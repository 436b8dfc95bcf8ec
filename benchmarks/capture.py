"""How often a step sees a captured value that is stale, or another's, in random programs: never.

    python -m benchmarks.capture             2,000 programs, and prints JSON lines
    python -m benchmarks.capture --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.capture --quick     a minute's look: few programs

Each program is called several times under a strategy, and as plain Python on one device; between the calls
what it captures is replaced, reordered, added, removed, frozen, changed in place.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._capture_programs import Program, batches
from benchmarks._harness import Log, counted, table

CALLS = 5
REPLICAS = (1, 2, 4)


class Outcome(NamedTuple):
    """What came of a program."""

    kind: str
    """``right``, ``refused`` by an error of this library, ``wrong``, or ``foreign`` for another error."""
    text: str
    calls: int
    """Calls that were compared."""


def _average(x: jax.Array) -> Any:
    return dj.get_replica_context().all_reduce("sum", dj.compute_average_loss(x))


def judge(seed: int, calls: int = CALLS) -> Outcome:
    """Runs both programs of a seed, and compares results and all variables after each call."""
    strategy = dj.MirroredStrategy(list(range(REPLICAS[seed % len(REPLICAS)])))
    program, plain = Program(seed, _average, strategy.scope), Program(seed, jnp.mean, nullcontext)
    with _silence():
        for number, x in enumerate(batches(seed, calls)):
            step, arguments = plain.call()
            expected = step(jnp.asarray(x), *arguments)
            try:
                difference = _compare(strategy, program, plain, x, expected)
            except dj.DistributeError as error:
                return Outcome("refused", f"{type(error).__name__}: {error}", number)
            except Exception as error:
                return Outcome("foreign", f"{type(error).__name__}: {error}", number)
            if difference:
                return Outcome("wrong", f"call {number}: {difference}; {plain.happened}", number)
            for each in (program, plain):
                each.change()
    return Outcome("right", "", calls)


@contextmanager
def _silence() -> Iterator[None]:
    """Leaves out what the library says of steps that recompile and combine what is equal."""
    log = logging.getLogger("distribute_jax")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _compare(
    strategy: dj.Strategy, program: Program, plain: Program, x: np.ndarray[Any, Any], expected: Any
) -> str:
    step, arguments = program.call()
    batch: Any = jnp.asarray(x)
    if program.with_batch:
        (batch,) = strategy.distribute_dataset([x])
    result = strategy.run(step, args=(batch, *arguments))
    results = [*map(np.asarray, result)]
    states = [np.asarray(v.get_raw_value()) for v in program.variables]
    wanted = [np.asarray(v.get_raw_value()) for v in plain.variables]
    if not np.allclose(results, [*map(np.asarray, expected)], rtol=1e-4, atol=1e-4):
        return f"result {results} for {expected}"
    unequal = [
        i
        for i, (a, b) in enumerate(zip(states, wanted, strict=True))
        if not np.allclose(a, b, rtol=1e-4)
    ]
    return f"variables {unequal} differ" if unequal else ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is counted."""

    cases: tuple[range, ...] = tuple(range(k, k + 100) for k in range(0, 2000, 100))
    """The seeds of the programs, a hundred in each case."""

    def __post_init__(self) -> None:
        """Refuses a count of nothing."""
        if not any(self.cases):
            raise ValueError(f"{self}: at least one program.")


FULL = Options()
QUICK = Options(cases=(range(60),))


def measure(options: Options) -> Log:
    """Runs the program of each seed, and counts what came of it."""
    log, figures, reasons = Log(), Counter[str](), Counter[str]()
    log.start()
    for seed in chain.from_iterable(options.cases):
        outcome = judge(seed)
        figures["programs"] += 1
        figures["calls"] += outcome.calls
        figures[outcome.kind] += 1
        if outcome.kind != "right":
            reasons[outcome.text.splitlines()[0][:100]] += 1
    log.add("capture", **figures)
    log.add("reasons", **dict(reasons.most_common(10)))
    return log


def report(log: Log) -> str:
    """Writes the records as a page."""
    (figures,), (reasons,) = log.of("capture"), log.of("reasons")
    rows = [
        ["programs", figures["programs"]],
        ["calls compared", figures["calls"]],
        ["right in every call", figures.get("right", 0)],
        ["refused by an error of this library", figures.get("refused", 0)],
        ["**silently wrong**", f"**{figures.get('wrong', 0)}**"],
        ["errors from inside JAX or Python", figures.get("foreign", 0)],
    ]
    parts = [
        "# What a step captures, in random programs",
        "Values of nine kinds (parameters, other variables, arrays, NumPy arrays small and large, numbers, "
        "flags, layers, layers in a dict) are kept in random places: cells, globals, defaults, partials, "
        "attributes, classes, containers of several kinds below each other, or arguments. Between the calls "
        "they are replaced, reordered, added, removed, frozen or changed in place. After each call the "
        "result and every variable are compared with plain Python on one device, where nothing can be "
        "stale.",
        table(["what", "number"], rows),
        "## Reasons of what was not right",
        table(["error", "programs"], [[k, v] for k, v in reasons.items() if k != "kind"]),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the number of programs that are silently wrong, which must be 0."""
    (figures,) = log.of("capture")
    question = f"silently wrong, {figures['programs']} random programs"
    return [Row(question, "captured values", counted(figures.get("wrong", 0)), 0.0)]


BENCHMARK = Benchmark(
    name="capture",
    question="Whether a captured value is ever stale, or another's.",
    quick=QUICK,
    full=FULL,
    minutes=(1, 15),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
