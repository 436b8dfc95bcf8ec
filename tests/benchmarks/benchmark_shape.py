"""What is the same in every benchmark, checked on a small measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks._benchmark import Benchmark, Row
from benchmarks._harness import Log
from benchmarks._workloads import perceptron

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
