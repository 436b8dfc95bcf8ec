"""The benchmarks of one run: each asked in a separate process, and the page of their answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks._benchmark import ROW_HEAD, Benchmark, Row, rows_of
from benchmarks._harness import Log, stem, surroundings, table

INDENT = " " * 6
NOTHING = "Nothing was measured: every case needs more devices than there are here."
PATIENCE = 20
"""Seconds that a benchmark has to end what it started, once it is told to."""


@dataclass(frozen=True)
class Answer:
    """What a benchmark's process printed, and how it ended."""

    benchmark: Benchmark[Any]
    log: Log
    status: int

    @property
    def rows(self) -> list[Row]:
        """Its part of the table of ratios."""
        return rows_of(self.log)


def ask(benchmark: Benchmark[Any], *, full: bool, devices: str) -> Answer:
    """Runs a benchmark in a separate process, and says meanwhile what it measures."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", "--devices", devices]
    command += [] if full else ["--quick"]
    # In a separate session it gets no Ctrl-C, and ends silently when it is asked to.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            records = list(_records(child.stdout or ()))
            status = child.wait()
        finally:
            _end(child)
    # One that failed has no headline, and perhaps not all that its page needs; with missed targets it has.
    whole = not status or any(record["kind"] == "headline" for record in records)
    return Answer(benchmark, Log(records if whole else []), status)


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Reads the records that a benchmark prints, and says what each is about."""
    started, told = time.monotonic(), ""
    for line in lines:
        if not line.startswith("{"):
            print(INDENT + line, end="", flush=True)
            continue
        record = json.loads(line)
        yield record
        text = progress(record)
        if text and text != told:
            print(f"{INDENT}{time.monotonic() - started:4.0f} s  {text}", flush=True)
            told = text


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def progress(record: Mapping[str, Any]) -> str:
    """Returns in a few words what a record is about."""
    if record["kind"] in ("environment", "headline", "absent"):
        return ""
    names = ("workload", "source", "scaling")
    words = [str(record[name]) for name in names if name in record]
    if "replicas" in record:
        words.append(f"× {record['replicas']}")
    if "processes" in record:
        words.append(f"{record['processes']} × {record['devices']}")
    return f"{record['kind']}: {' '.join(words)}" if words else str(record["kind"])


def print_rows(answers: Sequence[Answer]) -> None:
    """Prints the table of ratios."""
    # Where nobody looks at a terminal, lines are as long as they need to be.
    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = Table(box=SIMPLE)
    for at, name in enumerate(ROW_HEAD):
        shown.add_column(name, no_wrap=at > 1)
    for answer in answers:
        for row in answer.rows:
            shown.add_row(*row.cells)
    console.print(shown)


def write_page(answers: Sequence[Answer], folder: Path, command: str, *, full: bool) -> Path:
    """Writes the page, and beside it a folder with its pictures and all records; gives its path."""
    where = answers[0].log.records[0]
    name = stem("full" if full else "quick", where)
    path, pictures = folder / f"{name}.md", folder / name
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [
        f"# All benchmarks, {'full' if full else 'a quick look'}",
        surroundings(where),
        f"    {command}",
        "A ratio is the median over paired rounds with its 95% interval, or a count where there is none. "
        "A target is met where the lower end of the interval of at least 30 rounds meets it.",
        table(ROW_HEAD, [row.cells for answer in answers for row in answer.rows]),
        *(_section(answer, pictures) for answer in answers),
    ]
    path.write_text("\n\n".join(parts), encoding="utf-8")
    lines = [
        json.dumps({"benchmark": answer.benchmark.name, **record})
        for answer in answers
        for record in answer.log.records
    ]
    (pictures / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _section(answer: Answer, pictures: Path) -> str:
    """Returns a benchmark's page one heading lower, with its picture below its title."""
    benchmark, log = answer.benchmark, answer.log
    if len(log.records) == 1:
        return f"## {benchmark.question}\n\n{NOTHING}\n"
    text = re.sub(r"^#", "##", benchmark.report(log), flags=re.MULTILINE)
    if benchmark.draw is None:
        return text
    picture = pictures / f"{benchmark.name}.png"
    benchmark.draw(log, picture)
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n![{benchmark.question}]({pictures.name}/{picture.name})\n\n{rest}"
