"""The command ``distribute-jax``: ``launch``, ``plan``, ``doctor``, ``explain`` and ``demo``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from distribute_jax._errors import DistributeError
from distribute_jax.launch import say

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of ``sys.argv``, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="distribute-jax", description=_DESCRIPTION)
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('distribute-jax')}"
    )
    commands = parser.add_subparsers(required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    # Only the module of the command: a supervisor does not import JAX, which the others need.
    for name in {*arguments[:1]} & {*_COMMANDS} or _COMMANDS:
        module = importlib.import_module(f"distribute_jax.cli._{name}")
        command = commands.add_parser(
            name, help=module.HELP, allow_abbrev=False,
            description=getattr(module, "DESCRIPTION", f"{module.HELP.capitalize()}."),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(run=module.run, command=command)
        module.add_options(command)
    if not arguments:
        parser.print_help()
        return 2
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would show the usage of all commands
        options.command.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = options.run(options)
    except DistributeError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return code


_COMMANDS = ("launch", "plan", "doctor", "explain", "demo")
_DESCRIPTION = (
    "Starts training programs in many processes, plans them, and finds out why they do not start."
)
