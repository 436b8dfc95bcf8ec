"""The benchmark of several processes runs and its record is complete; no time is asserted."""

from __future__ import annotations

import re

import pytest
from benchmark_shape import answers_of

from benchmarks import scaling


@pytest.mark.exhaustive
def test_a_measurement_is_complete_and_both_ways_train_alike() -> None:
    """Real processes take turns between run and the step by hand; the page has a row for the layout."""
    options = scaling.Options(layouts=((2, 1),), kinds=("weak",), share=2, rounds=2, calls=1)
    log, page, rows = answers_of(scaling.BENCHMARK, options)
    (record,) = log.of("step")
    assert (record["scaling"], record["batch"]) == ("weak", 4)
    assert set(record["ms"]) == {scaling.RUN, scaling.BY_HAND, scaling.ALONE}
    assert min(record["ms"].values()) > 0
    assert record["ratio"]["rounds"] == 2
    assert len(re.findall(r"^\| 2 × 1 \|", page, re.MULTILINE)) == 1
    assert [row.target for row in rows] == [None]


def test_figures_follow_from_the_seconds() -> None:
    """A step of 2 s by hand of which 1.5 s stay without its all-reduce, and 2.2 s under run."""
    seconds = {scaling.RUN: [2.2] * 3, scaling.BY_HAND: [2.0] * 3, scaling.ALONE: [1.5] * 3}
    found = scaling.figures(seconds, 11)
    assert found["examples_per_s"] == pytest.approx(5.0)
    assert found["collective"] == pytest.approx(0.25)
    assert found["ratio"].median == pytest.approx(1.1)


def test_steps_that_train_differently_are_refused() -> None:
    """No ratio is given of two programs that do not compute the same."""
    with pytest.raises(ValueError, match="train differently"):
        scaling.check_equal({scaling.RUN: [1.0, 0.9], scaling.BY_HAND: [1.0, 0.8]})
