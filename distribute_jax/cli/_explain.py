"""``distribute-jax explain``: prints the cause and the cure of an error, as ``docs/errors.md`` has them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from textwrap import indent

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import not_a_name

HELP = "print the cause and the cure of an error of the library; without a name, list them all"
_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "errors.md", _PACKAGE.parent / "docs" / "errors.md")
"""A wheel has a copy of the page, a clone the page itself."""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("error", nargs="?", help="its name, such as OutOfSyncError")


def run(options: argparse.Namespace) -> int:
    page = next(place for place in _PLACES if place.exists()).read_text("utf-8")
    errors = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n\n##|\Z)", page, re.MULTILINE | re.DOTALL))
    if options.error is None:
        for name, text in errors.items():
            cause = re.match(r"\(.*?\) (.*?)[.;:]\s", f"{text}\n", re.DOTALL)
            print(f"{name}: {' '.join(cause[1].split()) if cause else text}")
        return 0
    asked = options.error.rpartition(".")[2]  # tracebacks show distribute_jax.OutOfSyncError
    for name, text in errors.items():
        if asked.lower() in (name.lower(), name.lower().removesuffix("error")):
            print(f"{name} {_plain(text)}")
            return 0
    raise ArgumentError(not_a_name("an error of distribute_jax", asked, errors))


def _plain(text: str) -> str:
    """Returns Markdown as a terminal shows it: links with their addresses, and code indented."""
    text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", text)
    return re.sub(
        r"```\w+\n(.*?)\n```", lambda found: indent(found[1], "    "), text, flags=re.DOTALL
    )
