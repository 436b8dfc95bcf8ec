"""The command ``distribute-jax``: ``launch``, ``plan``, ``doctor`` and ``demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from distribute_jax._errors import DistributeError
from distribute_jax.cli import _demo, _doctor, _launch, _plan
from distribute_jax.launch import say

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code.

    Args:
        arguments: what follows the name of the command; that of this process if None.
    """
    parser = argparse.ArgumentParser(prog="distribute-jax", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="{launch,plan,doctor,demo}")
    for command in (_launch, _plan, _doctor, _demo):
        command.add_to(commands)
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


_DESCRIPTION = (
    "Starts training programs in many processes, plans them, and finds out why they do not start."
)
