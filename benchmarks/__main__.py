"""All benchmarks, one after the other, and one dated page of what they found.

    python -m benchmarks                     a quick pass: few rounds, wide intervals
    python -m benchmarks --full              everything, for figures worth stating
    python -m benchmarks --only fit memory   some of them
    python -m benchmarks --peers             a step beside other frameworks; takes --full, --only, --replicas

Each benchmark runs in a separate process. In a clone, ``python3 dev.py bench`` starts this with what it
needs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import against_peers
from benchmarks._benchmark import Benchmark, add_devices
from benchmarks._harness import REPORTS, shown
from benchmarks._peer_environments import peer_arguments
from benchmarks._suite import Answer, ask, print_rows, write_page

QUESTIONS = (
    *("step_time", "fit", "input_pipeline", "collectives", "scaling"),
    *("memory", "sharded", "compile_time", "verify_cost", "guard_cost"),
    *("servers", "proof", "padding_proof", "capture", "trace"),
)
"""The modules that each answer one; a module has a ``BENCHMARK``."""


def main() -> int:
    """Runs the benchmarks, prints their ratios, and writes the page."""
    if "--peers" in sys.argv:
        return _beside_peers(sys.argv[1:])
    chosen = _arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    benchmarks = [importlib.import_module(f"benchmarks.{name}").BENCHMARK for name in chosen.only]
    _print_plan(benchmarks, chosen.full)
    started, answers = time.monotonic(), []
    try:
        for number, benchmark in enumerate(benchmarks, 1):
            print(f"[{number}/{len(benchmarks)}] {benchmark.name}", flush=True)
            answers.append(ask(benchmark, full=chosen.full, devices=chosen.devices))
    except KeyboardInterrupt:
        print("\nstopped" if answers else "\nstopped; nothing was written", flush=True)
        chosen.only = tuple(answer.benchmark.name for answer in answers)
        _finish(answers, chosen, (time.monotonic() - started) / 60)
        return 130
    return _finish(answers, chosen, (time.monotonic() - started) / 60)


def _beside_peers(given: list[str]) -> int:
    """Measures beside the peers, and writes a report: a quick look, or with ``--full`` all of it."""
    at = given.index("--devices") if "--devices" in given else len(given)  # always simulated
    rest = [text for text in given[:at] + given[at + 2 :] if text not in ("--peers", "--full")]
    quick = [] if "--full" in given else ["--quick"]
    with contextlib.ExitStack() as held:
        return against_peers.main(["--report", *quick, *peer_arguments(held), *rest])


def _finish(answers: list[Answer], chosen: argparse.Namespace, minutes: float) -> int:
    answered = [answer for answer in answers if answer.log.records]
    if answered:
        print_rows(answered)
        path = write_page(answered, chosen.report_dir, _command(chosen), full=chosen.full)
        print(f"{minutes:.1f} min; wrote {shown(path)}")
    failed = [answer.benchmark.name for answer in answers if answer.status]
    for name in failed:
        print(f"FAILED: {name}; to repeat it: python3 dev.py bench --only {name}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--full", action="store_true", help="every case, at least 30 paired rounds")
    parser.add_argument(
        "--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="some of the benchmarks"
    )
    parser.add_argument(
        "--report-dir", type=Path, default=REPORTS, help="where the page is written"
    )
    add_devices(parser)
    return parser.parse_args()


def _command(chosen: argparse.Namespace) -> str:
    """Returns what to type for such a run."""
    words = ["python3", "dev.py", "bench"]
    if chosen.full:
        words.append("--full")
    if chosen.devices != "simulated":
        words += ["--devices", chosen.devices]
    if chosen.only != QUESTIONS:
        words += ["--only", *chosen.only]
    return " ".join(words)


def _print_plan(benchmarks: list[Benchmark[Any]], full: bool) -> None:
    minutes = sum(benchmark.minutes[full] for benchmark in benchmarks)
    print(f"{len(benchmarks)} benchmarks, about {minutes:.0f} min on two cores:")
    for benchmark in benchmarks:
        print(f"  {benchmark.name:<15}{benchmark.minutes[full]:>5} min  {benchmark.question}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
