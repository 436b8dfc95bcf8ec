"""The command ``distribute-jax``: ``launch``, ``plan``, ``doctor``, ``explain`` and ``demo``."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from textwrap import indent
from typing import Any

from distribute_jax._errors import ArgumentError, DistributeError
from distribute_jax.launch import say

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of ``sys.argv``, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, TextIOWrapper):  # an encoding without "→" prints "?"
        sys.stdout.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(prog="distribute-jax", description=_DESCRIPTION)
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('distribute-jax')}"
    )
    commands = parser.add_subparsers(required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    # Only the module of the command: a supervisor does not import JAX, which the others need.
    for name in {*arguments[:1]} & {*_COMMANDS} or _COMMANDS:
        module: Any = importlib.import_module(__name__ + f"._{name}" * (name != "explain"))
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
_DESCRIPTION = "Starts training programs in many processes, plans them, and explains what fails."
# The command explain, which prints docs/errors.md: a link in the repository, a file in a wheel.
HELP = "print the cause and the cure of an error of the library; without a name, list them all"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("error", nargs="?", help="its name, such as OutOfSyncError")


def run(options: argparse.Namespace) -> int:
    page = (Path(__file__).parents[1] / "errors.md").read_text("utf-8")
    # Links with their addresses, and code indented, as a terminal shows them.
    page = re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", page)
    page = re.sub(r"```\w+\n(.*?)\n```", lambda m: indent(m[1], "    "), page, flags=re.DOTALL)
    errors = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n\n##|\Z)", page, re.MULTILINE | re.DOTALL))
    query = str(options.error).rpartition(".")[2]  # tracebacks show distribute_jax.OutOfSyncError
    for name, text in errors.items():
        if options.error is None:
            cause = re.split(r"[.;:]\s", f"{text.partition(') ')[2]}\n")[0]
            print(f"{name}: {' '.join(cause.split())}")
        elif query.lower() in (name.lower(), name.lower().removesuffix("error")):
            print(f"{name} {text}")
            return 0
    if options.error is None:
        return 0
    near = get_close_matches(query, errors) or ["distribute-jax explain, which lists them"]
    raise ArgumentError(f"There is no error {query!r}. Did you mean {' or '.join(near)}?")
