"""No random program has an output that is proved clean and changes with the padding.

The programs are those of ``benchmarks/_row_programs.py``, run with other padding and with more of it.
"""

from __future__ import annotations

import pytest

from benchmarks._random_programs import check_random_programs
from benchmarks._row_programs import Statement, row_programs
from benchmarks.padding_proof import Judged, judge, judge_and_count


@pytest.mark.exhaustive
def test_outputs_proved_clean_do_not_change_with_padding() -> None:
    figures = check_random_programs(500, row_programs, judge_and_count, never="proved_changed")
    # A proof that proves nothing, or refuses everything, would be sound too.
    assert figures["proved_unchanged"] > figures["undecided_unchanged"]
    assert figures["refused_changed"] >= 10 * figures["refused_unchanged"]


def judged(*statements: tuple[str, str]) -> Judged:
    """Judges a program whose statements take the newest values."""
    result = judge([Statement(kinds, name, "plainly", (0, 0)) for kinds, name in statements])
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
