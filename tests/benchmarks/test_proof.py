"""The counts of false proofs, of sync and of padding, count what they say, and their records are complete."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from benchmark_shape import answers_of
from jax import lax

from benchmarks import padding_proof, proof
from benchmarks._row_programs import Statement
from distribute_jax.program._padding_marks import CLEAN

pytestmark = pytest.mark.exhaustive

KNOWN = [
    lambda values, ref: jnp.sin(values[1]),  # differs, and is not proved
    lambda values, ref: lax.psum(values[1], "data"),  # equal, and proved
    lambda values, ref: jnp.abs(values[1]) * 0,  # equal, and not proved
]
OF_ROWS = [
    Statement("rows>vector", "real sum", "plainly", (0, 0)),  # unchanged, and proved
    Statement("rows>vector", "sum", "plainly", (0, 0)),  # changed, and refused
    Statement("rows>vector", "zero in all", "plainly", (0, 0)),  # unchanged, and undecided
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


def test_the_verdict_on_a_known_program_of_rows() -> None:
    judged = padding_proof.judge(OF_ROWS)
    assert judged is not None
    assert judged.verdicts == ["proved", "refused", "undecided"]
    assert judged.same == [True, False, True]
    figures: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    padding_proof.count(judged, figures, causes)
    assert (figures["programs"], figures["outputs"], figures["unchanged"]) == (1, 3, 2)
    assert (judged.false_proofs, judged.false_alarms) == (0, 0)
    assert causes == {"reduce_sum": 1}


@pytest.mark.parametrize("module", [proof, padding_proof])
def test_an_unsound_proof_is_detected(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Every output that differs, or changes, then counts as a false proof."""

    def trusting(jaxpr: Any, *_: Any, **__: Any) -> Any:
        outputs = jaxpr.jaxpr.outvars
        if module is proof:
            return SimpleNamespace(marks=[frozenset() for _ in outputs])
        return [CLEAN for _ in outputs]

    monkeypatch.setattr(module, "prove" if module is proof else "prove_padding", trusting)
    judged = module.judge(KNOWN if module is proof else OF_ROWS)
    assert judged is not None
    assert judged.false_proofs == 1
    assert not judged.false_alarms


def test_a_measurement_of_proofs_reports_the_requested_number_of_programs() -> None:
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


def test_a_measurement_of_padding_reports_the_requested_number_of_programs() -> None:
    log, text, rows = answers_of(padding_proof.BENCHMARK, padding_proof.Options(programs=4))
    (figures,) = log.of("padding")
    assert figures["programs"] >= 4
    assert figures["proved_changed"] == 0
    assert [row.met for row in rows] == [True]
    assert f"| programs run | {figures['programs']} |" in text
    assert "| **false proofs** (proved clean, and changed) | **0** |" in text
