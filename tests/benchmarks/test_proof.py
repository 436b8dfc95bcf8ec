"""The count of false proofs and false alarms counts what it says, and its record is complete."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest
from benchmark_shape import answers_of
from jax import lax

from benchmarks import proof
from benchmarks._programs import Statement

pytestmark = pytest.mark.exhaustive

KNOWN: list[Statement] = [
    lambda values, ref: jnp.sin(values[1]),  # differs, and is not proved
    lambda values, ref: lax.psum(values[1], "data"),  # equal, and proved
    lambda values, ref: jnp.abs(values[1]) * 0,  # equal, and not proved
]


def test_the_verdict_on_a_known_program() -> None:
    """Three statements and the ref: three equal ones, one of them a false alarm."""
    judged = proof.judge(KNOWN)
    assert judged is not None
    assert [not mark for mark in judged.marks] == [False, True, False, True]
    assert judged.false_proofs == 0
    assert judged.false_alarms == [{"x"}]
    figures: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    proof.count(judged, figures, causes)
    found = (figures["programs"], figures["outputs"], figures["proved"], figures["equal"])
    assert found == (1, 4, 2, 3)
    assert (figures["false_proofs"], figures["false_alarms"]) == (0, 1)
    assert causes == {"the per-replica argument": 1}


def test_an_unsound_proof_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output that differs then counts as a false proof."""

    def trusting(jaxpr: Any, marks: Any, *, axis_size: int) -> list[frozenset[str]]:
        return [frozenset() for _ in jaxpr.jaxpr.outvars]

    monkeypatch.setattr(proof, "prove", trusting)
    judged = proof.judge(KNOWN)
    assert judged is not None
    assert judged.false_proofs == 1
    assert judged.false_alarms == []


def test_a_measurement_reports_the_requested_number_of_programs() -> None:
    """Refused programs and those that JAX cannot differentiate are not among them."""
    log, text, rows = answers_of(proof.BENCHMARK, proof.Options(programs=12))
    (figures,) = log.of("proof")
    assert figures["programs"] >= 12
    assert figures["false_proofs"] == 0
    assert 0 < figures["proved"] <= figures["equal"] <= figures["outputs"]
    assert [row.met for row in rows] == [True]
    assert f"| programs run | {figures['programs']} |" in text
    assert "| **false proofs** (proved equal, and differ) | **0** |" in text
    assert f"| {figures['false_alarms']} |" in text
