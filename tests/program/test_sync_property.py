"""No random program has an output that is proved mirrored and yet differs between replicas.

The programs are those of ``benchmarks/_programs.py``. One that the proof accepts as free of deadlocks is
run on four replicas, so it must end.
"""

from __future__ import annotations

import pytest

from benchmarks._programs import UNARY, programs
from benchmarks._random_programs import check_random_programs
from benchmarks.proof import judge_and_count


@pytest.mark.exhaustive
def test_values_proved_mirrored_are_bitwise_equal() -> None:
    figures = check_random_programs(500, programs, judge_and_count, never="false_proofs")
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
