"""The count of false proofs of padding counts what it says, and its record is complete."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmark_shape import answers_of

from benchmarks import padding_proof
from benchmarks._row_programs import Statement
from distribute_jax.program._padding_marks import CLEAN

pytestmark = pytest.mark.exhaustive

KNOWN = [
    Statement("rows>vector", "real sum", "plainly", (0, 0)),  # unchanged, and proved
    Statement("rows>vector", "sum", "plainly", (0, 0)),  # changed, and refused
    Statement("rows>vector", "zero in all", "plainly", (0, 0)),  # unchanged, and undecided
]


def test_the_verdict_on_a_known_program() -> None:
    judged = padding_proof.judge(KNOWN)
    assert judged is not None
    assert judged.verdicts == ["proved", "refused", "undecided"]
    assert judged.same == [True, False, True]
    figures: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    padding_proof.count(judged, figures, causes)
    assert (figures["programs"], figures["outputs"], figures["unchanged"]) == (1, 3, 2)
    assert (judged.false_proofs, judged.false_alarms) == (0, 0)
    assert causes == {"reduce_sum": 1}


def test_an_unsound_proof_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output that changes then counts as a false proof."""

    def trusting(jaxpr: Any, other: Any, shares: Any, marks: Any) -> list[Any]:
        return [CLEAN for _ in jaxpr.jaxpr.outvars]

    monkeypatch.setattr(padding_proof, "prove_padding", trusting)
    judged = padding_proof.judge(KNOWN)
    assert judged is not None
    assert judged.false_proofs == 1


def test_a_measurement_reports_the_requested_number_of_programs() -> None:
    log, text, rows = answers_of(padding_proof.BENCHMARK, padding_proof.Options(programs=4))
    (figures,) = log.of("padding")
    assert figures["programs"] >= 4
    assert figures["proved_changed"] == 0
    assert [row.met for row in rows] == [True]
    assert f"| programs run | {figures['programs']} |" in text
    assert "| **false proofs** (proved clean, and changed) | **0** |" in text
