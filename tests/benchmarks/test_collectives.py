"""The benchmark of the all-reduces runs and its record is complete; no time is asserted."""

from __future__ import annotations

import re

import numpy as np
import pytest
from benchmark_shape import answers_of

from benchmarks import collectives

pytestmark = pytest.mark.exhaustive


def test_a_measurement_has_every_operation_at_every_size() -> None:
    options = collectives.Options(sizes=(8, 4096), replicas=(2, 4), rounds=2, calls=1)
    log, text, rows = answers_of(collectives.BENCHMARK, options)
    records = list(log.of("all_reduce"))
    assert {(r["operation"], r["replicas"], r["bytes"]) for r in records} == {
        (name, n, size) for name in collectives.OPERATIONS for n in (2, 4) for size in (8, 4096)
    }
    assert len(records) == 16
    for record in records:
        assert record["us"] > 0
        assert record["ratio"]["rounds"] == 2
        if record["operation"] == collectives.BASELINE:
            assert record["ratio"]["median"] == 1.0
    assert len(rows) == 2 * 3
    assert all("4 KiB" in row.question for row in rows)
    for name in collectives.OPERATIONS:
        assert len(re.findall(rf"^\| (8 B|4 KiB) \| {name} \|", text, re.MULTILINE)) == 4
    assert "## 2 replicas" in text
    assert "## 4 replicas" in text


def test_bandwidth_counts_what_each_replica_must_send() -> None:
    """On four replicas, three quarters of the array twice: 1 GB in a second is 1.5 GB/s."""
    assert collectives.bandwidth(10**9, 4, 1.0) == 1.5
    assert collectives.bandwidth(10**9, 1, 1.0) == 0


def test_an_operation_that_gives_another_sum_is_refused() -> None:
    sums = {collectives.BASELINE: np.ones(2), "other": np.array([1.0, 1.00001])}
    with pytest.raises(ValueError, match="other gives another sum"):
        collectives.check_equal_sums(sums)
