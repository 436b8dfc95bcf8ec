"""What the devices did while something ran, as ``jax.profiler`` saw it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

Interval = tuple[float, float]
"""Beginning and end in nanoseconds."""


@dataclass(frozen=True)
class Activity:
    """Seconds of one traced run."""

    whole: float
    """From the first call until the result is there."""
    running: float
    """In which at least one device ran an operation."""
    operations: float
    """In which each device ran one, added up: with fewer cores than devices they wait for cores."""

    @property
    def still(self) -> float:
        """In which no device ran anything."""
        return max(self.whole - self.running, 0.0)


def activity(run: Callable[[], Any]) -> Activity:
    """Traces one run, which waits for its results itself."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python would be several times slower
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            run()
            whole = time.perf_counter() - start
        (found,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(found))
        lines = list(_lines(data))
    running = covered(span for line in lines for span in line)
    if not running:
        raise RuntimeError("The trace shows no operation of any device.")
    # Those of a loop are inside the loop, which is an operation too.
    return Activity(whole, 1e-9 * running, 1e-9 * sum(map(covered, lines)))


def covered(spans: Iterable[Interval]) -> float:
    """Returns the length of what intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _lines(data: Any) -> Iterator[list[Interval]]:
    """Returns the operations of each device, or of each thread that stands for one."""
    for plane in data.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:") and line.name.startswith(("XLA Ops", "Stream")):
                yield [_span(event) for event in line.events]
            elif plane.name == "/host:CPU" and line.name.startswith("tf_"):
                yield _operations(list(line.events))


def _operations(events: list[Any]) -> list[Interval]:
    """Picks the operations of a thread: XLA marks the end of each by a separate event."""
    ended = {event.name.removeprefix("end: ") for event in events if event.name.startswith("end: ")}
    return [_span(event) for event in events if event.name in ended]


def _span(event: Any) -> Interval:
    return event.start_ns, event.start_ns + event.duration_ns
