"""The benchmark of ``fit`` measures what it says, in small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import fit
from benchmarks._fits import by_hand, with_fit, with_run

pytestmark = pytest.mark.exhaustive

WORK = replace(TINY, batches=4)


def test_a_small_run_has_a_row_for_every_column():
    """Equal losses, and two ratios for each; a row of the headline for each case."""
    cases = tuple(fit.Case(work=WORK, replicas=2, together=k) for k in (1, 2))
    log, page, rows = answers_of(fit.BENCHMARK, fit.Options(cases=cases, rounds=2))
    for record in log.of("losses"):
        assert record["losses"] == pytest.approx(
            dict.fromkeys(fit.COLUMNS, record["losses"][fit.FIT]), rel=1e-5
        )
    assert [r["column"] for r in log.of("epoch")] == list(fit.COLUMNS) * 2
    for name in fit.COLUMNS:
        assert page.count(f"| {name} |") == 2
    assert [row.question for row in rows] == [
        "epoch, tiny, 2 replicas, 1 batch in a dispatch",
        "epoch, tiny, 2 replicas, 2 batches in a dispatch",
    ]


def test_columns_that_train_differently_stop_the_run():
    """A ratio between two different trainings would say nothing."""
    with pytest.raises(ValueError, match="trains differently"):
        fit.equal_losses({fit.LOOP: lambda: 1.0, fit.FIT: lambda: 1.1})


def test_the_three_ways_go_on_alike():
    """Three epochs one after the other, several batches in a dispatch."""
    ours, loop, hand = (make(WORK, 2, 2) for make in (with_fit, with_run, by_hand))
    for _ in range(3):
        expected = hand()
        assert ours() == pytest.approx(expected, rel=1e-5)
        assert loop() == pytest.approx(expected, rel=1e-5)
