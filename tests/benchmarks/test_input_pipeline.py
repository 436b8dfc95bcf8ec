"""The benchmark of the input runs and its record is complete; no time is asserted."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_shape import answers_of

from benchmarks import input_pipeline
from benchmarks._sources import SOURCES
from benchmarks._workloads import MLP

pytestmark = pytest.mark.exhaustive


def test_a_measurement_answers_all_three_questions() -> None:
    options = input_pipeline.Options(batches=2, rounds=2, replicas=2)
    log, text, rows = answers_of(input_pipeline.BENCHMARK, options)
    ours = (input_pipeline.OURS, input_pipeline.BY_HAND, input_pipeline.BARE_STEP)
    assert [r["column"] for r in log.of("memory")] == list(ours)
    assert [r["column"] for r in log.of("waiting")] == ["both", "the steps", "the source"]
    assert [r["source"] for r in log.of("source")] == list(SOURCES)
    assert all(r["missing"] or r["ratio"]["median"] > 0 for r in log.of("source"))
    assert [row.target for row in rows] == [1.05, 1.15]
    for name in (*ours, "both", *SOURCES):
        assert f"| {name} |" in text


def test_our_loop_and_the_one_by_hand_train_alike() -> None:
    data = input_pipeline.in_memory(3)
    ours = input_pipeline.our_loop(data, 2)()
    by_hand = input_pipeline.hand_written_loop(MLP, data, 2)()[-1]
    np.testing.assert_allclose(
        [float(part) for part in ours.values], np.asarray(by_hand), rtol=2e-5
    )


@pytest.mark.parametrize("name", ["a generator", "dj.data.from_arrays", "Grain MapDataset"])
def test_every_source_gives_the_same_batches(name: str) -> None:
    x, y = (np.concatenate(parts) for parts in zip(*input_pipeline.in_memory(2), strict=True))
    source, missing = SOURCES[name](x, y, MLP.batch)
    assert missing is None
    batches = list(input_pipeline.find_source(source).open())
    np.testing.assert_array_equal(np.concatenate([b[0] for b in batches]), x)
    np.testing.assert_array_equal(np.concatenate([b[1] for b in batches]), y)
