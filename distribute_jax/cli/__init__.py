"""The command ``distribute-jax``: ``launch``, ``doctor`` and ``demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from distribute_jax._errors import DistributeError
from distribute_jax.cli import _demo, _doctor, _launch
from distribute_jax.launch import say

__all__ = ["main"]


_COMMANDS = (_launch, _doctor, _demo)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands."""
    top = argparse.ArgumentParser(prog="distribute-jax", description=_DESCRIPTION)
    commands = top.add_subparsers(required=True, metavar="{launch,doctor,demo}")
    for command in _COMMANDS:
        command.add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what stands behind the name of the command; that of this process if None.

    Returns:
        The exit code.
    """
    given = sys.argv[1:] if arguments is None else arguments
    options, unknown = parser().parse_known_args(given)
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


_DESCRIPTION = "Starts training programs in many processes, and finds out why they do not start."
