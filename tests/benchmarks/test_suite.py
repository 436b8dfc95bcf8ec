"""All benchmarks of one run: the page, the pictures, the records, and those that fail."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._benchmark import Benchmark, Row
from benchmarks._harness import Log, Ratio, environment
from benchmarks._suite import Answer, ask, print_rows, progress, write_page

ROOT = Path(__file__).parents[2]


def small_answer(name: str = "small", status: int = 0, **more: Any) -> Answer:
    """An answer whose records are made up."""
    records = [
        environment(),
        {"kind": "step", "workload": "tiny", "replicas": 4, "ms": 2.5},
        {
            "kind": "headline",
            "question": "step, tiny",
            "column": "ours / theirs",
            "ratio": {"median": 1.02, "low": 1.0, "high": 1.04, "rounds": 30},
            "target": 1.05,
        },
    ]
    benchmark: Benchmark[Any] = Benchmark(
        name=name,
        question="How small?",
        quick=None,
        full=None,
        minutes=(0, 0),
        measure=lambda _: Log(records),
        report=lambda log: f"# Small\n\n## Part\n\n{next(log.of('step'))['ms']}\n",
        headline=lambda _: [Row("step, tiny", "ours / theirs", Ratio(1.02, 1.0, 1.04, 30), 1.05)],
        **more,
    )
    return Answer(benchmark, Log(records), status)


WITHOUT_MEASUREMENT: dict[str, Any] = {
    "collectives": [{"rounds": 0}, {"sizes": (6,)}, {"replicas": (0,)}],
    "compile_time": [{"imports": 0}],
    "fit": [{"rounds": 0}, {"case": {"together": 3}}],
    "guard_cost": [{"case": {"steps": 0}}],
    "input_pipeline": [{"rounds": 0}],
    "scaling": [{"rounds": 0}, {"layouts": ()}, {"batch": 10}, {"kinds": ("big",)}],
    "servers": [{"rounds": 0}],
    "step_time": [{"rounds": 0}],
    "verify_cost": [{"case": {"rounds": 0}}],
}
"""Options of a benchmark, or of its first case, that leave nothing to measure."""


def _changed(options: Any, change: dict[str, Any]) -> Any:
    case = change.get("case")
    return replace(options, **({"cases": (replace(options.cases[0], **case),)} if case else change))


@pytest.mark.parametrize("name", WITHOUT_MEASUREMENT)
def test_options_that_leave_nothing_to_measure_are_refused(name: str) -> None:
    """No rounds, no layout, sizes that nothing divides, dispatches that do not make up an epoch."""
    quick = importlib.import_module(f"benchmarks.{name}").BENCHMARK.quick
    for change in WITHOUT_MEASUREMENT[name]:
        with pytest.raises(ValueError, match=r"at least|multiples|divided|not whole|the kinds are"):
            _changed(quick, change)


def test_the_page_has_all_tables_pictures_and_records(tmp_path: Path) -> None:
    """Where and how, the ratios, and each benchmark one heading lower with its picture."""
    answers = [small_answer(), small_answer("drawn", draw=lambda _, path: path.write_bytes(b"PNG"))]
    path = write_page(answers, tmp_path, "python3 dev.py bench", full=False)
    page = path.read_text(encoding="utf-8")
    assert path.name.startswith("quick_20")
    assert page.startswith("# All benchmarks, a quick look\n")
    assert "    python3 dev.py bench\n" in page
    row = "| step, tiny | ours / theirs | 1.02 [1.00, 1.04] | ≤ 1.05 | met |"
    assert page.count(row) == 2
    assert page.count("\n## Small\n\n") == 2
    assert page.count("\n### Part\n") == 2
    assert f"![How small?]({path.stem}/drawn.png)" in page
    assert (tmp_path / path.stem / "drawn.png").read_bytes() == b"PNG"
    lines = (tmp_path / path.stem / "records.jsonl").read_text().splitlines()
    kinds = [(json.loads(line)["benchmark"], json.loads(line)["kind"]) for line in lines]
    each = ("environment", "step", "headline")
    assert kinds == [(name, kind) for name in ("small", "drawn") for kind in each]


def test_where_no_case_fits_the_devices_the_page_says_so(tmp_path: Path) -> None:
    """On a machine with one device some questions have no answer, and no picture either."""

    def draw(*_: Any) -> None:
        raise AssertionError("there is nothing to draw")

    few = small_answer("few", draw=draw)
    empty = Answer(few.benchmark, Log(few.log.records[:1]), 0)
    page = write_page([small_answer(), empty], tmp_path, "command", full=True).read_text()
    assert page.count("## How small?\n\nNothing was measured: every case needs more devices") == 1
    assert page.count("### Part") == 1


def test_what_was_answered_before_ctrl_c_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour's figures are not lost with the last question; the page says which ones it has."""
    suite = importlib.import_module("benchmarks.__main__")
    asked = []

    def ask_twice(benchmark: Benchmark[Any], **_: Any) -> Answer:
        asked.append(benchmark.name)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return small_answer("memory")

    monkeypatch.setattr(suite, "ask", ask_twice)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    command = ["benchmarks", "--only", "memory", "fit", "--report-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert suite.main() == 130
    assert asked == ["memory", "fit"]
    (page,) = tmp_path.glob("*.md")
    assert "    python3 dev.py bench --only memory\n" in page.read_text(encoding="utf-8")
    assert "nothing was written" not in capsys.readouterr().out


def test_the_ratios_are_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([small_answer()])
    out = capsys.readouterr().out
    assert "1.02 [1.00, 1.04]" in out
    assert "met" in out


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"kind": "environment"}, ""),
        ({"kind": "step", "workload": "MLP", "replicas": 4}, "step: MLP × 4"),
        ({"kind": "step", "scaling": "weak", "processes": 2, "devices": 3}, "step: weak 2 × 3"),
        ({"kind": "proof", "programs": 3}, "proof"),
    ],
)
def test_progress_says_what_was_measured(record: dict[str, Any], text: str) -> None:
    assert progress(record) == text


def test_a_benchmark_that_fails_is_an_answer_without_records(
    capfd: pytest.CaptureFixture[str],
) -> None:
    answer = ask(small_answer("_no_such").benchmark, full=False, devices="simulated")
    assert answer.status != 0
    assert answer.log.records == []
    assert "benchmarks._no_such" in capfd.readouterr().err


@pytest.mark.parametrize("name", importlib.import_module("benchmarks.__main__").QUESTIONS)
def test_every_question_has_a_benchmark_of_its_name(name: str) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert benchmark.name == name
    assert type(benchmark.quick) is type(benchmark.full)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_ends_the_run_and_its_child(tmp_path: Path) -> None:
    """Without a traceback, without a page, and without a process left behind."""
    heard = (  # a shell ignores the signal for jobs in the background
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", heard, "--only", "proof", "--report-dir", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        for line in run.stdout or ():
            if line.startswith("[1/1] proof"):
                break
        time.sleep(1)
        children = _children(run.pid)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped; nothing was written" in out
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]
