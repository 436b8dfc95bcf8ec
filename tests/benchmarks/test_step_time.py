"""The step-time benchmark runs and its record is complete; no time is asserted."""

from __future__ import annotations

import re

import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import step_time
from benchmarks._inside import entry_of
from benchmarks._steps import COLUMNS, mirrored

pytestmark = pytest.mark.exhaustive


def test_a_measurement_is_complete_and_its_columns_train_alike(tmp_path) -> None:
    """All five ways to write a step, at four replicas; the picture is small."""
    options = step_time.Options(
        cases=((TINY, 4),),
        rounds=2,
        calls=1,
        loop_calls=3,
        turn=60,
        host_calls=2,
        equal_steps=3,
        functional=(),
    )
    log, page, rows = answers_of(step_time.BENCHMARK, options)
    (record,) = log.of("losses")
    assert set(record["losses"]) == set(COLUMNS)
    for values in record["losses"].values():
        assert values == pytest.approx(record["losses"][step_time.BASELINE], rel=2e-5)
    for kind in ("step", "loop"):
        steps = list(log.of(kind))
        assert [r["column"] for r in steps] == list(COLUMNS)
        assert all(r["ratio"]["rounds"] == 2 for r in steps)
    (host,) = log.of("host")
    assert host["target_us"] == pytest.approx(30 + 0.35 * 14)
    assert "### tiny, 4 replicas (2 rounds)" in page
    for name in COLUMNS:
        assert len(re.findall(rf"^\| {re.escape(name)} \|", page, re.MULTILINE)) == 1
    assert [row.target for row in rows] == [1.0, 1.0]
    step_time.draw(log, tmp_path / "step_time.png")
    assert 2_000 < (tmp_path / "step_time.png").stat().st_size < 100_000


def test_more_replicas_than_devices_stay_out() -> None:
    log = step_time.measure(step_time.Options(cases=((TINY, 1024),), rounds=1, functional=()))
    assert [r["kind"] for r in log.records] == ["environment"]


def test_a_column_that_trains_differently_is_refused() -> None:
    steps = {step_time.BASELINE: lambda: 1.0, "other": lambda: 1.001}
    with pytest.raises(ValueError, match="other trains differently"):
        step_time.equal_losses(steps, 1)


def test_the_number_of_variables_is_the_number_that_the_step_writes() -> None:
    trained = mirrored(TINY, 1)
    assert len(entry_of(trained)[0].outputs) == TINY.variables() == 14


def test_programs_of_state_in_and_out_run_beside_jit() -> None:
    options = step_time.Options(cases=(), rounds=2, functional_calls=1)
    log, page, rows = answers_of(step_time.BENCHMARK, options)
    assert [r["program"] for r in log.of("functional")] == list(step_time.FUNCTIONAL)
    assert [row.target for row in rows] == [1.0, 1.0, 1.0, 1.05]
    assert "## State in and out" in page
