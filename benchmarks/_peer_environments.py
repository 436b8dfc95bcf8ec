"""The environments of the peers on other frameworks, which dev.py makes when they are first needed."""

from __future__ import annotations

import contextlib
import sys

import dev

PEERS = {
    name: dev.Contents(f"-peers-{name}", ["-r", f"constraints/peers-{name}.txt"], python)
    for name, python in (("keras", ""), ("tensorflow", ""), ("torch", "3.11"))
}
"""By the package that each is about; nothing but that and what it needs."""


def peer_arguments(held: contextlib.ExitStack) -> list[str]:
    """Returns the interpreters as options of ``against_peers``; one without is a row that says so."""
    arguments = []
    for package, contents in PEERS.items():
        try:
            python = held.enter_context(dev.environment_ready(contents))
            arguments += ["--python", f"{package}={python}"]
        except SystemExit as problem:
            print(problem, file=sys.stderr, flush=True)
            why = str(problem).partition(": ")[2].splitlines()[0].partition(". ")[0]
            arguments += ["--absent", f"{package}={why}"]
    return arguments
