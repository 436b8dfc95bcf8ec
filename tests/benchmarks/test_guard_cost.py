"""The benchmark of guards runs and its record is complete; no time is asserted."""

from __future__ import annotations

import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import guard_cost

pytestmark = pytest.mark.exhaustive


def test_a_measurement_has_fit_with_and_without_each_guard() -> None:
    """Of each workload."""
    case = guard_cost.Case(work=TINY, steps=2, replicas=2, rounds=1)
    log, page, rows = answers_of(guard_cost.BENCHMARK, guard_cost.Options(cases=(case,)))
    guards = [guard_cost.BARE, guard_cost.CHECKED, guard_cost.SKIPPING]
    assert [r["column"] for r in log.of("step")] == guards
    assert all(guard in page for guard in guards)
    assert [row.column for row in rows] == guards[1:]
