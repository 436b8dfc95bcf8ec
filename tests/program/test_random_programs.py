"""Random programs: no captured value is stale, no false proof of sync, and none of padding.

One that the proof of sync accepts as free of deadlocks is run on four replicas, so it must end. Those of rows
are run with other padding and with more of it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import padding_proof, proof
from benchmarks._programs import UNARY, programs
from benchmarks._random_programs import check_random_programs
from benchmarks._row_programs import Statement, row_programs
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


@pytest.mark.exhaustive
def test_values_proved_mirrored_are_bitwise_equal() -> None:
    figures = check_random_programs(500, programs, proof.judge_and_count, never="false_proofs")
    # A proof that proves nothing would be sound too.
    assert figures["proved"] > 2 * figures["false_alarms"]
    assert figures["refused"] < figures["programs"]


def test_random_programs_have_every_kind_of_source() -> None:
    """Groups, callbacks, permutations, scatters, exchanges, linear solves and random bits."""
    wanted = {
        *("psum in groups", "all_gather in groups", "pmax in groups", "callback", "ring"),
        *("psum_scatter", "all_to_all", "linear solve with a source", "random bits", "random"),
        *("custom tangent", "custom gradient with a source", "replica", "one way"),
    }
    assert wanted <= set(UNARY)


@pytest.mark.exhaustive
def test_outputs_proved_clean_do_not_change_with_padding() -> None:
    figures = check_random_programs(
        500, row_programs, padding_proof.judge_and_count, never="proved_changed"
    )
    # A proof that proves nothing, or refuses everything, would be sound too.
    assert figures["proved_unchanged"] > figures["undecided_unchanged"]
    assert figures["refused_changed"] >= 10 * figures["refused_unchanged"]


def judged(*statements: tuple[str, str]) -> padding_proof.Judged:
    """Judges a program whose statements take the newest values."""
    result = padding_proof.judge(
        [Statement(kinds, name, "plainly", (0, 0)) for kinds, name in statements]
    )
    assert result is not None
    return result


@pytest.mark.exhaustive
def test_nan_in_padding_only_is_not_assumed_finite() -> None:
    """Its product with a gradient of zero is NaN."""
    result = judged(
        ("rows>rows", "nan in padding"),
        ("rows,vector>rows", "dense"),
        ("rows,vector>vector", "gradient of the real mean"),
    )
    assert result.false_proofs == 0
    assert "undecided" in result.verdicts


def test_programs_with_and_without_the_mask_are_distinguished() -> None:
    """Verdict of the proof, and whether outputs change."""
    assert judged(("rows>vector", "sum")) == (["refused"], result_where("sum"), [False])
    assert judged(("rows>vector", "real sum"))[::2] == (["proved"], [True])
    assert judged(("rows>rows", "attention to real"))[::2] == (["proved"], [True])
    assert judged(("row>number", "number of rows"))[::2] == (["undecided"], [False])


def result_where(name: str) -> list[str]:
    """The location for which a sum over rows is refused."""
    where = judged(("rows>vector", name)).where
    assert where[0].startswith("reduce_sum at _row_programs.py:")
    return where
