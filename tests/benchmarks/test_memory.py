"""The benchmark of memory counts what is known for a small model."""

from __future__ import annotations

import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import memory
from benchmarks._steps import SHARD_MAP
from benchmarks._workloads import perceptron

pytestmark = pytest.mark.exhaustive

PARAMS = 4 * (6 * 5 + 5 + 5 * 4 + 4)
"""Bytes of the weights; Adam keeps twice as much and two counters."""


def test_a_measurement_counts_the_bytes_of_every_strategy(tmp_path) -> None:
    """Mirrored as by hand; a central device holds what the replicas do not."""
    log, page, rows = answers_of(memory.BENCHMARK, memory.Options(cases=((TINY, 4),)))
    found = {r["column"]: r for r in log.of("memory")}
    by_hand, ours = found[SHARD_MAP], found[memory.MIRRORED]
    assert by_hand["params"] == ours["params"] == PARAMS
    assert by_hand["optimizer"] == 2 * PARAMS + 4
    assert ours["optimizer"] == 2 * PARAMS + 8
    assert {k: by_hand[k] for k in memory.PLANNED} == {k: ours[k] for k in memory.PLANNED}
    assert ours["arguments"] == 3 * PARAMS + 8 + 2 * (4 * 6 + 4)
    central = found[memory.CENTRAL]
    assert (central["params"], central["optimizer"]) == (0, 0)
    assert central["elsewhere"] == 3 * PARAMS + 8
    assert central["peak"] is None
    for name in memory.COLUMNS:
        assert f"| {name} |" in page
    assert rows[0].met is True
    memory.draw(log, tmp_path / "memory.png")
    assert 2_000 < (tmp_path / "memory.png").stat().st_size < 100_000


def test_a_sharded_update_keeps_a_quarter_of_the_moments() -> None:
    """Arrays under 1,024 numbers stay whole; those of the one kernel that is larger are divided by four."""
    work = perceptron("wide", (64, 64, 4), batch=4)
    found = memory.sharded(work, 4)
    small = 64 + 64 * 4 + 4
    assert found["params"] == 4 * (64 * 64 + small)
    assert found["optimizer"] == 2 * 4 * (64 * 64 // 4 + small) + 8


def test_an_array_on_one_device_counts_there_only() -> None:
    import jax
    import numpy as np

    there = jax.devices()[1]
    held = memory.bytes_of({"a": jax.device_put(np.zeros(3, np.float32), there)})
    assert held == {there: 12}
