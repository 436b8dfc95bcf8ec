"""``distribute-jax launch``: runs a program in several processes on one machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from os.path import exists, isdir, join
from pathlib import Path
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._supervision import GRACE_SECONDS
from distribute_jax.launch import CACHE, cache_folder, supervise


def add_options(command: argparse.ArgumentParser) -> None:
    for flags, kind, default, metavar, text in _OPTIONS:
        command.add_argument(*flags, type=kind, default=default, metavar=metavar, help=text)
    add_program(command)


def add_program(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m", dest="module", action="store_true", help="run the program as a module"
    )
    command.add_argument("program", help="a Python script, or a module with -m")
    rest = command.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False  # Python 3.11 would list it among the missing ones


def run(options: argparse.Namespace) -> int:
    check_program(options.program, is_module=options.module)
    min_processes = options.min_processes or options.processes
    if min_processes > options.processes:
        raise ArgumentError(
            f"launch: --min-processes {min_processes} is above --max-processes {options.processes}."
        )
    if options.rejoin is not None and min_processes == options.processes:
        raise ArgumentError(
            "launch: --rejoin has no effect where no process may be missing. Add --min-processes K, with "
            f"K below -n {options.processes}, or leave --rejoin out."
        )
    program = ["-m", options.program] if options.module else [options.program]
    return supervise(
        [sys.executable, *program, *options.arguments],
        {**os.environ, CACHE: cache_folder(os.environ)},
        processes=options.processes,
        min_processes=min_processes,
        rejoin=_REJOIN_SECONDS if options.rejoin is None else options.rejoin,
        devices=options.devices_per_process,
        max_restarts=options.max_restarts,
        max_pause=options.max_pause,
        grace=options.grace,
    )


def check_program(program: str, *, is_module: bool, command: str = "launch") -> None:
    missing = ""  # by os.path, since a Path raises where it is too long
    if is_module:
        first = program.partition(".")[0]  # to look further would import it
        if not first or not (PathFinder.find_spec(first, [str(Path.cwd())]) or find_spec(first)):
            missing = f"no module {program!r} here or among what is installed"
    elif isdir(program) and not exists(join(program, "__main__.py")):
        missing = f"no __main__.py in {program!r}"
    elif not exists(program):
        missing = f"no file {program!r} in {Path.cwd()}"
    if missing:
        raise ArgumentError(
            f"{command}: there is {missing}. Give the path of a Python script, or the name of a module "
            f"after -m; options of {command} come before it."
        )


def at_least(least: int, most: float = float("inf")) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is above {most}, the most on one machine")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


MAX_ON_ONE_MACHINE = 1024
"""The most processes, and simulated devices of each: a process that has imported JAX takes 200 MB or more."""
_REJOIN_SECONDS = 60.0

_OPTIONS: tuple[tuple[Sequence[str], Callable[[str], Any], Any, str, str], ...] = (
    (("-n", "--processes", "--max-processes", "--nproc-per-node"), at_least(1, MAX_ON_ONE_MACHINE), 1, "N",
     f"number of processes, at most {MAX_ON_ONE_MACHINE} (1)"),
    (("--min-processes",), at_least(1), None, "K",
     "continue without processes that fail while at least K are left; default: restart all of them"),
    (("--rejoin",), _seconds, None, "SECONDS",
     "with --min-processes: time with fewer processes after which they save, and those that failed are "
     f"started again ({_REJOIN_SECONDS:g})"),
    (("--devices-per-process",), at_least(1, MAX_ON_ONE_MACHINE), None, "M",
     "simulated CPU devices of each process; default: the devices that JAX finds"),
    (("--max-restarts",), at_least(0), 3, "R",
     "give up after this many restarts in a row without a step beyond all earlier ones (3)"),
    (("--max-pause",), _seconds, 30.0, "SECONDS",
     "longest pause before a restart without progress: 1, 2, 4, … up to this (30)"),
    (("--grace",), _seconds, GRACE_SECONDS, "SECONDS",
     f"time for the processes to save and exit after SIGTERM or Ctrl-C ({GRACE_SECONDS:g})"),
)  # fmt: skip
"""Flags, type, default, metavar and help."""

HELP = "start a program in many processes"
DESCRIPTION = """\
Starts a program in N processes on this machine and supervises them. When a process fails, the others are
stopped, one line names the process that failed, and all are restarted as long as there is progress: a step
beyond all earlier ones, as reported by dj.report_step(step), counted over the complete training. A program in
which every process fails with the same error before the first step is not restarted.

In each process dj.MultiWorkerMirroredStrategy() finds the job through dj.cluster_resolver.detect(). Output is
prefixed with the number of the process. SIGTERM and Ctrl-C let the processes save and exit; after the grace
period, or at a second signal, they are killed.

On several machines use mpirun, torchrun, Slurm, Kubernetes or a TPU pod, whose processes the strategy finds
as well.
"""
