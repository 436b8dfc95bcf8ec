"""``distribute-jax launch``: a program in many processes, on one machine or on several."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax.cluster_resolver._base import with_port
from distribute_jax.launch import (
    CACHE,
    Inbox,
    Launch,
    Link,
    Machines,
    OneMachine,
    cache_folder,
    supervise,
)

LOOPBACK = "127.0.0.1"


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "launch",
        help="start a program in many processes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run, command=command)
    add = command.add_argument
    add("--processes", type=_at_least(1), default=1, metavar="N", help="on this machine (1)")
    add(
        "--devices-per-process",
        type=_at_least(1),
        metavar="M",
        help="simulated CPU devices of each; without it each has those that JAX finds",
    )
    add(
        "--max-restarts",
        type=_at_least(0),
        default=3,
        metavar="R",
        help="give up after so many restarts in a row without a step beyond all earlier ones (3)",
    )
    add(
        "--max-pause",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="between a failure without progress and the restart: 1, 2, 4, … up to this (30)",
    )
    add(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="for the processes to save and end after SIGTERM or SIGINT (10)",
    )
    add("--nodes", type=_at_least(1), default=1, metavar="K", help="machines in all (1)")
    add("--node-rank", type=_at_least(0), default=0, metavar="I", help="which one this is, from 0")
    add("--coordinator", metavar="HOST:PORT", help="where the supervisor of node 0 listens")
    add(
        "--start-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="for the other machines to come (300)",
    )
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="a Python script, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    """Launches the program and gives the exit code of the job."""
    inbox = Inbox()
    host = _checked_place(options)
    _check_program(options.program, is_module=options.module)
    program = ["-m", options.program] if options.module else [options.program]
    first = options.node_rank * options.processes
    launch = Launch(
        command=[sys.executable, *program, *options.arguments],
        here=range(first, first + options.processes),
        processes=options.nodes * options.processes,
        devices=options.devices_per_process,
        host=host,
        max_restarts=options.max_restarts,
        longest_pause=options.max_pause,
        grace=options.grace,
        environment={**os.environ, CACHE: cache_folder(os.environ)},
    )
    return supervise(launch, _machines(options, host, inbox), inbox)


def _check_program(program: str, *, is_module: bool) -> None:
    """Refuses at once what no process could run."""
    path = Path(program)
    if is_module:
        first = program.partition(".")[0]  # to look further would import it
        found = first and (PathFinder.find_spec(first, [str(Path.cwd())]) or find_spec(first))
        what = "" if found else f"no module {program!r} here or among what is installed"
    elif path.is_dir():
        what = "" if (path / "__main__.py").exists() else f"no __main__.py in {program!r}"
    else:
        what = "" if path.exists() else f"no file {program!r} in {Path.cwd()}"
    if what:
        raise ArgumentError(
            f"launch: there is {what}. Give the path of a Python script, or the name of a module behind -m; "
            "options of the launcher come before it."
        )


def _checked_place(options: argparse.Namespace) -> str:
    """Gives the host that process 0 listens on."""
    if options.nodes == 1:
        if options.coordinator is not None:
            raise ArgumentError(
                f"--coordinator {options.coordinator}: with one machine there is nobody to meet. Give "
                "--nodes and --node-rank too, or leave it out."
            )
        return LOOPBACK
    if options.node_rank >= options.nodes:
        raise ArgumentError(
            f"--node-rank {options.node_rank}: with --nodes {options.nodes} it is a number from 0 to "
            f"{options.nodes - 1}."
        )
    if options.coordinator is None:
        raise ArgumentError(
            f"--nodes {options.nodes}: say where the machines meet, on all of them the same, by "
            "--coordinator with the address of node 0 and a port that is free there, such as "
            "--coordinator 10.0.0.1:7777."
        )
    return with_port(options.coordinator, "--coordinator").rpartition(":")[0].strip("[]")


def _machines(options: argparse.Namespace, host: str, inbox: Inbox) -> Machines:
    if options.nodes == 1:
        return OneMachine()
    layout = {
        "--nodes": options.nodes,
        "--processes": options.processes,
        "--devices-per-process": options.devices_per_process,
        "--max-restarts": options.max_restarts,
        "--max-pause": options.max_pause,
        "program": [options.program, *options.arguments],
    }
    return Link(
        (host, int(options.coordinator.rpartition(":")[2])),
        options.node_rank,
        options.nodes,
        layout=layout,
        inbox=inbox,
        seconds=options.start_timeout,
    )


def _at_least(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {least}")
        return int(text)

    return parsed


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


_DESCRIPTION = """\
Starts a program in N processes and watches over them. Where one ends with an error or by a signal, the others
are ended, one line says which it was, and all are started again, as long as that brings the training further:
a step beyond all earlier ones, as dj.report_step(step) says, counted over the whole training.

In each process dj.cluster_resolver.detect() finds the job, so that dj.MultiWorkerMirroredStrategy() does.
What a process prints has its number in front. SIGTERM and SIGINT are passed on; after the grace the
processes are killed.

On several machines, start it on each, with the same program and another --node-rank:
  distribute-jax launch --processes 1 --nodes 2 --node-rank 0 --coordinator 10.0.0.1:7777 train.py
Where others can reach the port, set DISTRIBUTE_JAX_SECRET to the same text on all machines.
"""
