"""Timing on a noisy machine: interleaved rounds, ratios of pairs, intervals, a record to keep."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from math import comb
from pathlib import Path
from typing import Any

import jax

REPORTS = Path(__file__).parent / "reports"

Timings = dict[str, list[float]]
"""For each column, the seconds of one step in each round."""


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios with its interval."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        """Reads ``1.02 [0.99, 1.05]``, or ``1.00`` where it was counted."""
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if self.rounds else ""
        return f"{self.median:.2f}{interval}"


def counted(value: float) -> Ratio:
    """Returns a ratio that was not timed but counted: no rounds, no interval."""
    return Ratio(value, value, value, 0)


def in_turns(columns: Mapping[str, Callable[[], float]], rounds: int) -> Timings:
    """Lets all columns take their turn in each round, in a new order, so that noise meets all equally.

    Args:
        columns: what takes a turn and gives its seconds.
        rounds: how many times each column takes its turn.
    """
    timings: Timings = {name: [] for name in columns}
    order, draw = list(columns), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            timings[name].append(columns[name]())
    return timings


def interleaved(
    steps: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    calls: int,
    ahead: int = 0,
    warm_up: int = 3,
) -> Timings:
    """Times the steps of all columns in turns.

    With ``ahead=0`` every call is waited for before the next, as in a loop that reads its loss; with
    more, that many steps may be unfinished, as in a loop that does not.

    Args:
        steps: for each column, what dispatches one step.
        rounds: how many times each column takes its turn.
        calls: steps in one turn.
        ahead: steps that may be dispatched and not finished; unbounded loops can deadlock on a CPU.
        warm_up: steps of each column before the first round; the first one compiles.
    """
    for step in steps.values():
        for _ in range(warm_up):
            jax.block_until_ready(step())
    return in_turns({k: partial(_turn, step, calls, ahead) for k, step in steps.items()}, rounds)


def calls_within(seconds: float, step: Callable[[], Any], most: int, least: int) -> int:
    """Counts the steps that one turn has room for; the first call, which compiles, is not timed."""
    jax.block_until_ready(step())
    return max(least, min(most, int(seconds / _turn(step, 1, 0))))


def _turn(step: Callable[[], Any], calls: int, ahead: int) -> float:
    jax.block_until_ready(step())  # brings the column's data back into the caches
    unfinished: deque[Any] = deque()
    start = time.perf_counter()
    for _ in range(calls):
        unfinished.append(step())
        if len(unfinished) > ahead:
            jax.block_until_ready(unfinished.popleft())
    jax.block_until_ready(list(unfinished))
    return (time.perf_counter() - start) / calls


def dispatches(steps: Mapping[str, Callable[[], Any]], calls: int) -> Timings:
    """Times only the calls until they return, in turns; the results are waited for outside."""
    timings: Timings = {name: [] for name in steps}
    for step in steps.values():
        jax.block_until_ready(step())
    for _ in range(calls):
        for name, step in steps.items():
            start = time.perf_counter()
            result = step()
            timings[name].append(time.perf_counter() - start)
            jax.block_until_ready(result)
    return timings


def ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Returns the median over the rounds of time by time, with its 95% interval."""
    ratios = [a / b for a, b in zip(times, baseline, strict=True)]
    return Ratio(statistics.median(ratios), *median_interval(ratios), len(ratios))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns an interval for the median from order statistics: no assumption on the noise.

    The k-th smallest and k-th largest of n values hold the median between them unless fewer than k
    values fall on one side of it, which has a binomial probability. With too few values for the
    confidence, the interval is their whole range.
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while k < n // 2 and (outside := outside + 2 * comb(n, k) / 2**n) <= 1 - confidence:
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]


def interval_text(of: Mapping[str, Any]) -> str:
    """Writes a ratio of a record, where it stands as its fields."""
    return str(Ratio(**of))


def environment() -> dict[str, Any]:
    """Returns where figures were measured."""
    return {
        "kind": "environment",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "devices": jax.device_count(),
        "platform": jax.devices()[0].platform,
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
    }


def surroundings(where: Mapping[str, Any]) -> str:
    """Returns in a report where and on what its figures were measured."""
    text = (
        f"{where['date']}, Python {where['python']}, JAX {where['jax']}, Flax {where['flax']}, "
        f"{where['system']}: {where['devices']} {where['platform']} devices, "
        f"{where['cores']} cores."
    )
    if where["platform"] == "cpu" and where["devices"] > where["cores"]:
        text += (
            f" The devices are simulated and take turns on {where['cores']} cores: with several "
            "replicas the figures show overhead and contention, not scaling."
        )
    return text


def usable_cores() -> int:
    """Counts the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Log:
    """JSON lines: printed as they come, and kept for the report."""

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self.records = list(records)

    def start(self) -> None:
        """Notes where the figures are measured."""
        self.add(**environment())

    def add(self, kind: str, **fields: Any) -> None:
        """Adds one record; ratios become their fields."""
        plain = {k: asdict(v) if isinstance(v, Ratio) else v for k, v in fields.items()}
        self.records.append({"kind": kind, **plain})
        print(json.dumps(self.records[-1]), flush=True)

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        """Returns the records of one kind."""
        return (record for record in self.records if record["kind"] == kind)


@contextmanager
def stopwatch(times: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a block to a table."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def stem(question: str, where: Mapping[str, Any]) -> str:
    """Names a dated report after the question and the versions, without its ending."""
    python = "py" + "".join(where["python"].split(".")[:2])
    return f"{question}_{where['date']}_{python}_jax{where['jax']}"


def shown(path: Path) -> Path:
    """Shortens a path in the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write_report(question: str, log: Log, text: str) -> None:
    """Writes a page to the dated reports, and says where it is."""
    path = REPORTS / f"{stem(question, log.records[0])}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {shown(path)}")
