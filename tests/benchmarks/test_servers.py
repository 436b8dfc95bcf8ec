"""The benchmark of parameter servers runs and its record is complete; no time is asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark_shape import answers_of

from benchmarks import servers

pytestmark = pytest.mark.exhaustive


def test_a_measurement_has_steps_empty_closures_and_bounds() -> None:
    """Each way, number of workers and bound, with the targets where they hold."""
    cases = (servers.Case(width=8, batch=4, calls=2),)
    options = replace(servers.QUICK, cases=cases, rounds=1, empty=2, slow=4, seconds=(0.002, 0.001))
    log, page, rows = answers_of(servers.BENCHMARK, options)
    assert [r["workers"] for r in log.of("step")] == [r["workers"] for r in log.of("empty")]
    assert [r["bound"] for r in log.of("staleness")] == ["1", "0", "4", "16"]
    assert min(r["rate"] for r in log.of("staleness")) > 0
    assert {(r["way"], r["size"]) for r in log.of("transfer")} >= {
        (way, size) for way in ("processes", servers.SOCKET) for size in servers.TRANSFERS
    }
    targets = [row.target for row in rows if "ray" not in row.question]
    assert targets == [None, None, 1.0, 1.0, 1.0, None, 1.0, None, None, servers.TWICE, None]
    assert "| max_staleness |" in page
    assert "| 100 | processes |" in page
