"""The benchmark of builds and imports runs and its record is complete; no time is asserted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmark_shape import TINY, answers_of

from benchmarks import compile_time
from benchmarks._steps import NNX_JIT, RUN, SHARD_MAP, SHARDED_JIT

pytestmark = pytest.mark.exhaustive


def test_a_measurement_has_every_build_its_parts_and_the_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {compile_time.OURS: "import json", compile_time.THEIRS: "import ast"}
    monkeypatch.setattr(compile_time, "IMPORTS", quick)
    case = compile_time.Case(work=TINY, replicas=4, rounds=1)
    options = compile_time.Options(cases=(case,), imports=1)
    log, page, rows = answers_of(compile_time.BENCHMARK, options)
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
    compile_time.draw(log, tmp_path / "compile_time.png")
    assert 2_000 < (tmp_path / "compile_time.png").stat().st_size < 100_000


def test_the_seconds_of_an_import_are_those_of_the_process() -> None:
    """Whatever Python needs to start: the clock begins with the line, and here stands half a second on."""
    line = "time.perf_counter = lambda: start + 0.5"
    assert compile_time.import_seconds(line) == pytest.approx(0.5)
