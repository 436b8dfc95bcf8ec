"""The benchmark of the comparison with one device runs and its record is complete; no time is asserted."""

from __future__ import annotations

import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import verify_cost

pytestmark = pytest.mark.exhaustive


def test_a_measurement_has_the_first_call_with_and_without() -> None:
    """With it, the step is compiled for one device as well."""
    options = verify_cost.Options(cases=(verify_cost.Case(work=TINY, replicas=2, rounds=1),))
    log, page, rows = answers_of(verify_cost.BENCHMARK, options)
    calls = [(r["workload"], r["column"]) for r in log.of("first call")]
    suffixes = ("", verify_cost.FLOAT64, verify_cost.DROPOUT, verify_cost.BATCH_NORM)
    works = [TINY.name + suffix for suffix in suffixes]
    assert calls == [(w, column) for w in works for column in (verify_cost.OFF, verify_cost.AUTO)]
    assert min(r["ms"] for r in log.of("first call")) > 1  # a compilation, not a look into a cache
    assert all(name in page and column in page for name, column in calls)
    assert [row.column for row in rows] == [verify_cost.AUTO] * 4
