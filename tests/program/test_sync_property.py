"""No random program has an output that is proved mirrored and yet differs between replicas.

The programs are those of ``benchmarks/_programs.py``. One that the proof accepts as free of deadlocks is
run on four replicas, so it must end.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, event, given, note, reject, settings

from benchmarks._programs import UNARY, Statement, programs
from benchmarks.proof import count, judge
from distribute_jax._errors import DeadlockError


def check_one(statements: list[Statement], figures: Counter[str]) -> None:
    try:
        judged = judge(statements)
    except DeadlockError:
        event("refused: may hang")
        figures["refused"] += 1
        return
    if judged is None:
        reject()
    note(f"{judged.jaxpr}\nmarks {judged.marks}\nequal {judged.equal}")
    assert judged.false_proofs == 0
    event(f"false alarms: {len(judged.false_alarms)} of {len(judged.marks)} outputs")
    count(judged, figures, Counter())


@pytest.mark.parametrize(
    "examples", [12, pytest.param(500, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_what_is_proved_mirrored_is_equal_to_the_last_bit(examples: int) -> None:
    figures: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=examples < 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def search(statements: list[Statement]) -> None:
        check_one(statements, figures)

    search()
    print(dict(figures))
    # A proof that proves nothing would be safe as well.
    assert figures["proved"] > 2 * figures["false_alarms"]
    assert figures["refused"] < figures["programs"]


def test_every_kind_of_source_is_among_the_pieces() -> None:
    """Groups, callbacks, permutations, scatters, exchanges, linear solves and random bits."""
    wanted = {
        *("psum in groups", "all_gather in groups", "pmax in groups", "callback", "ring"),
        *("psum_scatter", "all_to_all", "linear solve with a source", "random bits", "random"),
        *("custom tangent", "custom gradient with a source", "replica", "one way"),
    }
    assert wanted <= set(UNARY)
