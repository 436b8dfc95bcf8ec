"""No captured value is stale or confused in the random programs of benchmarks/capture.py."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.capture import CALLS, judge

FEW, MANY = 25, 525


def _judge(first: int, number: int, calls: int = CALLS) -> Counter[str]:
    outcomes = {seed: judge(seed, calls) for seed in range(first, first + number)}
    bad = {seed: o.text for seed, o in outcomes.items() if o.kind in ("wrong", "foreign")}
    assert not bad
    return Counter(outcome.kind for outcome in outcomes.values())


@pytest.mark.parametrize("part", range(4))
def test_one_hundred_random_programs_are_right_or_refused(part: int) -> None:
    """After each call the result and all variables are those of plain Python on one device."""
    assert _judge(part * FEW, FEW, calls=2)["right"] > 0.7 * FEW


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_and_one_hundred_random_programs_are_right_or_refused(part: int) -> None:
    assert _judge(part * MANY, MANY)["right"] > 0.95 * MANY
