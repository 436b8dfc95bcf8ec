"""The benchmark of divided state counts what is known for a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark_shape import answers_of

from benchmarks import sharded
from benchmarks._inside import collectives_of
from benchmarks._workloads import momentum, perceptron

LOOP = """\
%sum (a: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %a)
}

%body (c: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %g = (bf16[8]{0}, f32[2,8]{1,0}) all-gather(%x, %y), dimensions={1}, metadata={op_name="a"}
  %r = f32[2]{0} reduce-scatter(%g), to_apply=%sum, metadata={op_name="all-gather(%x)"}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %w = (s32[], f32[2,8]) while(%t), condition=%if, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %p = pred[5]{0} all-reduce(%w), to_apply=%sum
}
"""


def test_a_collective_in_a_loop_counts_in_each_round() -> None:
    found = set(collectives_of(LOOP))
    assert found == {("all-gather", 3, 16 + 64), ("reduce-scatter", 3, 8), ("all-reduce", 1, 5)}


@pytest.mark.exhaustive
def test_a_measurement_counts_what_is_divided() -> None:
    """One kernel of 64 × 64 is divided by four, gathered forward, and its gradient scattered."""
    work = replace(perceptron("wide", (64, 64, 4), batch=64), optimizer=momentum)
    options = sharded.Options(cases=((work, 4),), rounds=2, turn=0.01)
    log, page, rows = answers_of(sharded.BENCHMARK, options)
    found = {r["column"]: r for r in log.of("sharded")}
    ours, small = found[sharded.OURS], 64 + 64 * 4 + 4
    batch = 64 // 4 * (64 * 4 + 4)
    assert ours["arguments"] == 2 * 4 * (64 * 64 // 4 + small) + 4 + batch
    assert found[sharded.MIRRORED]["arguments"] == 2 * 4 * (64 * 64 + small) + 4 + batch
    assert ours["collectives"]["all-gather"] == [1, 4 * 64 * 64]
    assert ours["collectives"]["reduce-scatter"] == [1, 64 * 64]
    assert ours["bits"] == found[sharded.MIRRORED]["bits"] == 0
    assert ours["gradients"] == 4 * 64 * 64
    for name in found:
        assert f"| {name} |" in page
    unmet = [row.question for row in rows if row.met is False]
    assert unmet in ([], ["bytes gathered, wide"])  # there is less to send of the activations
