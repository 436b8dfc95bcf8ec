"""The trace of an epoch counts what ran on the devices, and only that."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import fit, trace
from benchmarks._traced import Activity, activity, covered

pytestmark = pytest.mark.exhaustive


def test_overlapping_operations_are_covered_once():
    """Two that overlap, one inside another, one apart: 0 to 5 and 7 to 8."""
    assert covered([(7, 8), (0, 3), (2, 5), (2.5, 3)]) == 6.0
    assert covered([]) == 0.0


def test_a_run_that_waits_on_the_host_leaves_the_devices_still():
    """A tenth of a second of sleep beside a multiplication is time in which nothing runs."""
    multiply = jax.jit(lambda x: (x @ x).sum())
    x = jnp.ones((400, 400))
    multiply(x).block_until_ready()

    def run() -> None:
        multiply(x).block_until_ready()
        time.sleep(0.1)

    seen = activity(run)
    assert 0 < seen.running <= seen.operations
    assert seen.still >= 0.1
    assert seen.whole == pytest.approx(seen.still + seen.running)


def test_nothing_is_still_for_less_than_no_time():
    """The clocks of the trace and of the host differ a little."""
    assert Activity(whole=1.0, running=1.001, operations=2.0).still == 0.0


def test_a_small_run_has_a_row_for_every_column():
    """Each column has its figures, and the devices ran in each."""
    case = fit.Case(work=replace(TINY, batches=4), replicas=2, together=2)
    log, page, rows = answers_of(trace.BENCHMARK, trace.Options(cases=(case,), rounds=2))
    records = list(log.of("trace"))
    assert [r["column"] for r in records] == list(fit.COLUMNS)
    for record in records:
        assert 0 < record["running"] < record["whole"]
        assert f"| {record['column']} | {record['whole']:.2f} |" in page
    assert [row.question for row in rows] == [
        "operations of an epoch, tiny, 2 replicas, 2 batches in a dispatch"
    ]
