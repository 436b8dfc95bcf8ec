"""Each benchmark in small: it runs, and its records and its page are complete; no time is asserted."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import (
    collectives,
    compile_time,
    fit,
    guard_cost,
    input_pipeline,
    memory,
    memory_limit,
    padding_proof,
    proof,
    scaling,
    servers,
    sharded,
    step_time,
    trace,
    verify_cost,
)
from benchmarks._benchmark import Benchmark, Row
from benchmarks._fits import by_hand, with_fit, with_run
from benchmarks._harness import Log
from benchmarks._inside import entry_of
from benchmarks._row_programs import Statement
from benchmarks._sources import SOURCES
from benchmarks._steps import COLUMNS, NNX_JIT, RUN, SHARD_MAP, SHARDED_JIT, mirrored
from benchmarks._traced import Activity, activity, covered
from benchmarks._workloads import MLP, momentum, perceptron
from distribute_jax.program._padding_marks import CLEAN

pytestmark = pytest.mark.exhaustive

TINY = perceptron("tiny", (6, 5, 4), batch=8)


def answers_of(
    benchmark: Benchmark[Any], options: Any, folder: Path | None = None
) -> tuple[Log, str, list[Row]]:
    """Measures, and gives the records, the page and the headline, both made from the printed lines.

    The picture is drawn in the folder, and is small.
    """
    log = benchmark.measure(options)
    assert {"python", "jax", "flax", "cores", "devices", "date"} <= log.records[0].keys()
    printed = Log([json.loads(json.dumps(record)) for record in log.records])
    page, rows = benchmark.page(printed), benchmark.headline(printed)
    assert page.startswith("# ")
    assert f"python -m benchmarks.{benchmark.name} --report" in page
    assert rows
    for row in rows:
        assert row.ratio.low <= row.ratio.median <= row.ratio.high
        assert row.met is None or row.ratio.rounds == 0  # a few rounds decide nothing, a count does
    assert type(benchmark.quick) is type(benchmark.full) is type(options)
    if folder is not None:
        benchmark.draw(printed, folder / "picture.png")
        assert 2_000 < (folder / "picture.png").stat().st_size < 100_000
    return printed, page, rows


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (
            lambda: collectives.check_equal_sums(
                {collectives.BASELINE: np.ones(2), "other": np.array([1.0, 1.00001])}
            ),
            "other gives another sum",
        ),
        (
            lambda: fit.equal_losses({fit.LOOP: lambda: 1.0, fit.FIT: lambda: 1.1}),
            "trains differently",
        ),
        (
            lambda: scaling.check_equal({scaling.RUN: [1.0, 0.9], scaling.BY_HAND: [1.0, 0.8]}),
            "train differently",
        ),
        (
            lambda: step_time.equal_losses(
                {step_time.BASELINE: lambda: 1.0, "other": lambda: 1.001}, 1
            ),
            "other trains differently",
        ),
    ],
)
def test_programs_that_compute_something_else_are_refused(
    check: Callable[[], None], text: str
) -> None:
    """A ratio between them would say nothing."""
    with pytest.raises(ValueError, match=text):
        check()


def test_step_time_is_complete_and_its_columns_train_alike(tmp_path) -> None:
    """All five ways to write a step, at four replicas; the picture is small."""
    options = step_time.Options(
        cases=((TINY, 4),),
        rounds=2,
        calls=1,
        loop_calls=3,
        turn=60,
        host_calls=2,
        equal_steps=3,
        functional=(),
    )
    log, page, rows = answers_of(step_time.BENCHMARK, options, tmp_path)
    (record,) = log.of("losses")
    assert set(record["losses"]) == set(COLUMNS)
    for values in record["losses"].values():
        assert values == pytest.approx(record["losses"][step_time.BASELINE], rel=2e-5)
    for kind in ("step", "loop"):
        steps = list(log.of(kind))
        assert [r["column"] for r in steps] == list(COLUMNS)
        assert all(r["ratio"]["rounds"] == 2 for r in steps)
    (host,) = log.of("host")
    assert host["target_us"] == pytest.approx(30 + 0.35 * 14)
    assert "### tiny, 4 replicas (2 rounds)" in page
    for name in COLUMNS:
        assert len(re.findall(rf"^\| {re.escape(name)} \|", page, re.MULTILINE)) == 1
    assert [row.target for row in rows] == [1.0, 1.0]


def test_more_replicas_than_devices_stay_out() -> None:
    log = step_time.measure(step_time.Options(cases=((TINY, 1024),), rounds=1, functional=()))
    assert [r["kind"] for r in log.records] == ["environment"]


def test_the_number_of_variables_is_the_number_that_the_step_writes() -> None:
    trained = mirrored(TINY, 1)
    assert len(entry_of(trained)[0].outputs) == TINY.variables() == 14


def test_programs_of_state_in_and_out_run_beside_jit() -> None:
    options = step_time.Options(cases=(), rounds=2, functional_calls=1)
    log, page, rows = answers_of(step_time.BENCHMARK, options)
    assert [r["program"] for r in log.of("functional")] == list(step_time.FUNCTIONAL)
    assert [row.target for row in rows] == [1.0, 1.0, 1.0, 1.0, 1.05]
    assert "## State in and out" in page


def test_fit_has_a_row_for_every_column():
    """Equal losses, and two ratios for each; a row of the headline for each case."""
    cases = tuple(fit.Case(work=replace(TINY, batches=4), replicas=2, together=k) for k in (1, 2))
    log, page, rows = answers_of(fit.BENCHMARK, fit.Options(cases=cases, rounds=2))
    for record in log.of("losses"):
        assert record["losses"] == pytest.approx(
            dict.fromkeys(fit.COLUMNS, record["losses"][fit.FIT]), rel=1e-5
        )
    assert [r["column"] for r in log.of("epoch")] == list(fit.COLUMNS) * 2
    for name in fit.COLUMNS:
        assert page.count(f"| {name} |") == 2
    assert [row.question for row in rows] == [
        "epoch, tiny, 2 replicas, 1 batch in a dispatch",
        "epoch, tiny, 2 replicas, 2 batches in a dispatch",
    ]


def test_the_three_ways_to_fit_go_on_alike():
    """Three epochs one after the other, several batches in a dispatch."""
    ours, loop, hand = (
        make(replace(TINY, batches=4), 2, 2) for make in (with_fit, with_run, by_hand)
    )
    for _ in range(3):
        expected = hand()
        assert ours() == pytest.approx(expected, rel=1e-5)
        assert loop() == pytest.approx(expected, rel=1e-5)


def test_overlapping_operations_are_covered_once():
    """Two that overlap, one inside another, one apart: 0 to 5 and 7 to 8."""
    assert covered([(7, 8), (0, 3), (2, 5), (2.5, 3)]) == 6.0
    assert covered([]) == 0.0


def test_a_run_that_waits_on_the_host_leaves_the_devices_still():
    """A tenth of a second of sleep beside a multiplication is time in which nothing runs."""
    multiply = jax.jit(lambda x: (x @ x).sum())
    x = jnp.ones((400, 400))
    multiply(x).block_until_ready()

    def run() -> None:
        multiply(x).block_until_ready()
        time.sleep(0.1)

    seen = activity(run)
    assert 0 < seen.running <= seen.operations
    assert seen.still >= 0.1
    assert seen.whole == pytest.approx(seen.still + seen.running)


def test_nothing_is_still_for_less_than_no_time():
    """The clocks of the trace and of the host differ a little."""
    assert Activity(whole=1.0, running=1.001, operations=2.0).still == 0.0


def test_a_trace_has_a_row_for_every_column():
    """Each column has its figures, and the devices ran in each."""
    case = fit.Case(work=replace(TINY, batches=4), replicas=2, together=2)
    log, page, rows = answers_of(trace.BENCHMARK, trace.Options(cases=(case,), rounds=2))
    records = list(log.of("trace"))
    assert [r["column"] for r in records] == list(fit.COLUMNS)
    for record in records:
        assert 0 < record["running"] < record["whole"]
        assert f"| {record['column']} | {record['whole']:.2f} |" in page
    assert [row.question for row in rows] == [
        "operations of an epoch, tiny, 2 replicas, 2 batches in a dispatch"
    ]


def test_the_input_pipeline_answers_all_three_questions() -> None:
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


def test_collectives_have_every_operation_at_every_size() -> None:
    options = collectives.Options(sizes=(8, 4096), replicas=(2, 4), rounds=2, calls=1)
    log, text, rows = answers_of(collectives.BENCHMARK, options)
    records = list(log.of("all_reduce"))
    assert {(r["operation"], r["replicas"], r["bytes"]) for r in records} == {
        (name, n, size) for name in collectives.OPERATIONS for n in (2, 4) for size in (8, 4096)
    }
    assert len(records) == 16
    for record in records:
        assert record["us"] > 0
        assert record["ratio"]["rounds"] == 2
        if record["operation"] == collectives.BASELINE:
            assert record["ratio"]["median"] == 1.0
    assert len(rows) == 2 * 3
    assert all("4 KiB" in row.question for row in rows)
    for name in collectives.OPERATIONS:
        assert len(re.findall(rf"^\| (8 B|4 KiB) \| {name} \|", text, re.MULTILINE)) == 4
    assert "## 2 replicas" in text
    assert "## 4 replicas" in text


def test_bandwidth_counts_what_each_replica_must_send() -> None:
    """On four replicas, three quarters of the array twice: 1 GB in a second is 1.5 GB/s."""
    assert collectives.bandwidth(10**9, 4, 1.0) == 1.5
    assert collectives.bandwidth(10**9, 1, 1.0) == 0


def test_scaling_is_complete_and_both_ways_train_alike() -> None:
    """Real processes take turns between run and the step by hand; the page has a row for the layout."""
    options = scaling.Options(layouts=((2, 1),), kinds=("weak",), share=2, rounds=2, calls=1)
    log, page, rows = answers_of(scaling.BENCHMARK, options)
    (record,) = log.of("step")
    assert (record["scaling"], record["batch"]) == ("weak", 4)
    assert set(record["ms"]) == {scaling.RUN, scaling.BY_HAND, scaling.ALONE}
    assert min(record["ms"].values()) > 0
    assert record["ratio"]["rounds"] == 2
    assert len(re.findall(r"^\| 2 × 1 \|", page, re.MULTILINE)) == 1
    assert [row.target for row in rows] == [None]


def test_servers_have_steps_empty_closures_and_bounds() -> None:
    """Each way, number of workers and bound, with the targets where they hold."""
    cases = (servers.Case(width=8, batch=4, calls=2),)
    options = replace(servers.QUICK, cases=cases, rounds=1, empty=2, slow=4, seconds=(0.002, 0.001))
    log, page, rows = answers_of(servers.BENCHMARK, options)
    assert [r["workers"] for r in log.of("step")] == [r["workers"] for r in log.of("empty")]
    assert [r["bound"] for r in log.of("staleness")] == ["1", "0", "4", "16"]
    assert min(r["rate"] for r in log.of("staleness")) > 0
    assert {(r["way"], r["size"]) for r in log.of("transfer")} >= {
        (way, size) for way in ("processes", servers.SOCKET) for size in servers.TRANSFERS
    }
    targets = [row.target for row in rows if "ray" not in row.question]
    assert set(targets[:2]) <= {None, servers.RATIO}  # by how long a step takes on this machine
    assert targets[2:] == [1.0, 1.0, 1.0, None, 1.0, None, None, servers.TWICE, None]
    assert "| max_staleness |" in page
    assert "| 100 | processes |" in page


def test_compile_time_has_every_build_its_parts_and_the_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {compile_time.OURS: "import json", compile_time.THEIRS: "import ast"}
    monkeypatch.setattr(compile_time, "IMPORTS", quick)
    case = compile_time.Case(work=TINY, replicas=4, rounds=1)
    options = compile_time.Options(cases=(case,), imports=1)
    log, page, rows = answers_of(compile_time.BENCHMARK, options, tmp_path)
    builds = {r["column"]: r for r in log.of("build")}
    assert set(builds) == {RUN, SHARD_MAP, SHARDED_JIT, NNX_JIT}
    assert min(r["ms"] for r in builds.values()) > 1  # a compilation, not a look into a cache
    (parts,) = log.of("parts")
    assert list(parts["ms"][RUN]) == ["bind", "trace", "prove", "lower and compile"]
    assert sum(parts["ms"][RUN].values()) == pytest.approx(builds[RUN]["ms"])
    assert min(parts["ms"][SHARD_MAP].values()) > 0
    assert {r["column"] for r in log.of("import")} == set(compile_time.IMPORTS)
    for name in builds:
        assert re.search(rf"^\| tiny \| 4 \| {re.escape(name)} \|", page, re.MULTILINE)
    assert [row.target for row in rows] == [1.15, 1.1]


def test_the_seconds_of_an_import_are_those_of_the_process() -> None:
    """Whatever Python needs to start: the clock begins with the line, and here stands half a second on."""
    line = "time.perf_counter = lambda: start + 0.5"
    assert compile_time.import_seconds(line) == pytest.approx(0.5)


def test_guard_cost_has_fit_with_and_without_each_guard() -> None:
    """Of each workload."""
    case = guard_cost.Case(work=TINY, steps=2, replicas=2, rounds=1)
    log, page, rows = answers_of(guard_cost.BENCHMARK, guard_cost.Options(cases=(case,)))
    guards = [guard_cost.BARE, guard_cost.CHECKED, guard_cost.SKIPPING]
    assert [r["column"] for r in log.of("step")] == guards
    assert all(guard in page for guard in guards)
    assert [row.column for row in rows] == guards[1:]


def test_verify_cost_has_the_first_call_with_and_without() -> None:
    """With it, the step is compiled for one device as well."""
    options = verify_cost.Options(cases=(verify_cost.Case(work=TINY, replicas=2, rounds=1),))
    log, page, rows = answers_of(verify_cost.BENCHMARK, options)
    calls = [(r["workload"], r["column"]) for r in log.of("first call")]
    suffixes = ("", verify_cost.FLOAT64, verify_cost.DROPOUT, verify_cost.BATCH_NORM)
    works = [TINY.name + suffix for suffix in suffixes]
    assert calls == [(w, column) for w in works for column in (verify_cost.OFF, verify_cost.AUTO)]
    assert min(r["ms"] for r in log.of("first call")) > 1  # a compilation, not a look into a cache
    assert all(name in page and column in page for name, column in calls)
    assert [row.column for row in rows] == [verify_cost.AUTO] * 4


PARAMS = 4 * (6 * 5 + 5 + 5 * 4 + 4)
"""Bytes of the weights; Adam keeps twice as much and two counters."""


def test_memory_counts_the_bytes_of_every_strategy(tmp_path) -> None:
    """Mirrored as by hand; a central device holds what the replicas do not."""
    log, page, rows = answers_of(memory.BENCHMARK, memory.Options(cases=((TINY, 4),)), tmp_path)
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


def test_a_sharded_update_keeps_a_quarter_of_the_moments() -> None:
    """Arrays under 1,024 numbers stay whole; those of the one kernel that is larger are divided by four."""
    work = perceptron("wide", (64, 64, 4), batch=4)
    found = memory.sharded(work, 4)
    small = 64 + 64 * 4 + 4
    assert found["params"] == 4 * (64 * 64 + small)
    assert found["optimizer"] == 2 * 4 * (64 * 64 // 4 + small) + 8


def test_an_array_on_one_device_counts_there_only() -> None:
    there = jax.devices()[1]
    held = memory.bytes_of({"a": jax.device_put(np.zeros(3, np.float32), there)})
    assert held == {there: 12}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_model_of_three_times_the_limit_trains_divided_and_only_divided() -> None:
    """Under the same limit the mirrored one cannot be made."""
    _, page, rows = answers_of(memory_limit.BENCHMARK, memory_limit.BENCHMARK.quick)
    assert [row.met for row in rows] == [True, True, True], page


def test_sharded_counts_what_is_divided() -> None:
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
