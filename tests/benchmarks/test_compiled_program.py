"""The compiled program of a step is the hand-written one, counted rather than timed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest
from cases import long

from benchmarks._inside import collectives_of, compiled_of
from benchmarks._steps import mesh_of, mirrored, shard_map_parts
from benchmarks._workloads import CNN, DEEP, MLP, RESNET50, TRANSFORMER, Workload, images

# What is counted grows with the batch and the images, and is the same for both.
SMALL_TRANSFORMER = replace(TRANSFORMER, batch=8)
SMALL_RESNET = replace(RESNET50, batch=8, data=partial(images, 32, 3, 1000))


def counted(compiled: Any) -> dict[str, float]:
    """Returns what can be counted in a compiled program: arithmetic, traffic, collectives, memory."""
    cost, memory, text = compiled.cost_analysis(), compiled.memory_analysis(), compiled.as_text()
    return {
        "flops": cost["flops"],
        "bytes accessed": cost["bytes accessed"],
        "all-reduces": len(re.findall(r" all-reduce(?:-start)?\(", text)),
        "aliased buffers": len(re.findall(r"(?:may|must)-alias\)", text)),
        "inputs": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak memory": memory.peak_memory_in_bytes,
    }


def hand_written(work: Workload, replicas: int, *, summed: bool = True) -> Any:
    jitted, state, batch = shard_map_parts(work, mesh_of(replicas), summed=summed)
    return jitted.lower(*state, *batch).compile()


@pytest.mark.parametrize(
    ("work", "replicas"),
    [
        (MLP, 4),
        *(long(MLP, n) for n in (2, 8)),
        *(long(work, n) for work in (DEEP, CNN, SMALL_TRANSFORMER, SMALL_RESNET) for n in (2, 4)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.name,
)
def test_run_compiles_to_the_hand_written_program(work: Workload, replicas: int) -> None:
    ours = counted(compiled_of(mirrored(work, replicas)))
    theirs = counted(hand_written(work, replicas))
    # XLA adds up in float32, so the order of the operations shows in the last digit.
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ours["aliased buffers"] == work.variables()
    assert ours["all-reduces"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("work", [MLP, DEEP, CNN, SMALL_TRANSFORMER], ids=lambda work: work.name)
def test_one_replica_sums_nothing(work: Workload) -> None:
    """Its program is the hand-written one without the sum, but that gradients stay apart in memory."""
    ours = counted(compiled_of(mirrored(work, 1)))
    theirs = counted(hand_written(work, 1, summed=False))
    of_sum = counted(hand_written(work, 1))
    apart = {"temporaries", "bytes accessed"}
    assert {k: v for k, v in ours.items() if k not in apart} == pytest.approx(
        {k: v for k, v in theirs.items() if k not in apart}, rel=1e-6
    )
    assert theirs["bytes accessed"] <= ours["bytes accessed"] < of_sum["bytes accessed"]
    assert ours["temporaries"] <= 1.01 * theirs["temporaries"]


@pytest.mark.exhaustive
def test_a_step_that_does_more_is_distinguished() -> None:
    jitted, state, batch = shard_map_parts(MLP, mesh_of(4))
    more = jax.jit(lambda *flat: [*jitted(*flat)[:-1], flat[0] * 2])
    changed = counted(more.lower(*state, *batch).compile())
    same = counted(hand_written(MLP, 4))
    differs = {name for name in same if changed[name] != same[name]}
    assert {"flops", "bytes accessed", "aliased buffers", "outputs"} <= differs


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
