"""``distribute-jax plan``: prints what the first step of a program needs on each device."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from distribute_jax import _context
from distribute_jax._checks import check_number, check_optional
from distribute_jax.cli._launch import add_program, at_least, check_program
from distribute_jax.launch import say
from distribute_jax.program import StepPlan, plan_table


def add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    numbers = "numbers of replicas, as 8,64,1024 (those of the program's strategy)"
    add("--replicas", type=_numbers, default=(), metavar="N,…", help=numbers)
    memory = "memory of one device, to print which plans fit"
    add("--memory", type=float, metavar="GIB", help=memory)
    add_program(command)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(at_least(1), text.split(",")))


def run(options: argparse.Namespace) -> int:
    check_program(options.program, is_module=options.module, command="plan")
    check_optional(check_number, "plan: --memory", options.memory)
    memory = None if options.memory is None else int(options.memory * 2**30)

    def show(plan: Callable[[int | None], StepPlan]) -> NoReturn:
        table = plan_table([plan], options.replicas or (None,), memory)
        print(table if len(options.replicas) > 1 or memory is not None else table.plans[0])
        raise SystemExit(0)

    sys.argv = [options.program, *options.arguments]
    sys.path.insert(0, "" if options.module else str(Path(options.program).resolve().parent))
    _context.plan_hooks.append(show)
    try:
        runner: Any = runpy.run_module if options.module else runpy.run_path
        runner(options.program, run_name="__main__")
    finally:
        _context.plan_hooks.clear()
    say(f"plan: {options.program} has ended without a call of strategy.run.")
    return 1


HELP = "print what the first step of a program takes on each device, without running it"
DESCRIPTION = """\
Runs a program up to its first strategy.run, or to the first step of fit, compiles that step without running
it, and prints the bytes, collectives and seconds that it takes on each device. The devices of the replicas
need not be there.
"""
