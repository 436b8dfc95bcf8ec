"""A model trains of which a device may hold a third, in processes that the kernel limits."""

from __future__ import annotations

import sys

import pytest
from benchmark_shape import answers_of

from benchmarks import memory_limit


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_model_of_three_times_the_limit_trains_divided_and_only_divided() -> None:
    """Under the same limit the mirrored one cannot be made."""
    _, page, rows = answers_of(memory_limit.BENCHMARK, memory_limit.BENCHMARK.quick)
    assert [row.met for row in rows] == [True, True, True], page
