"""Prints the plain Flax program from which a program of the gallery was made.

    python examples/gallery/plain.py vae | diff - examples/gallery/vae.py

A line that ends with ``# new`` was added, and one that is a comment ``# plain:`` was replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NEW, PLAIN = (
    re.compile(r"^.*  # new\n", re.MULTILINE),
    re.compile(r"(?<=^)( *)# plain: ", re.MULTILINE),
)


def source(name: str) -> str:
    """Returns the text of a program of the gallery."""
    return (Path(__file__).parent / f"{name}.py").read_text("utf-8")


def plain(name: str) -> str:
    """Returns the program without the added lines and with the replaced ones."""
    return PLAIN.sub(r"\1", NEW.sub("", source(name)))


def changed(name: str) -> tuple[int, int]:
    """Returns how many lines were added and how many were replaced."""
    return len(NEW.findall(source(name))), len(PLAIN.findall(source(name)))


if __name__ == "__main__":
    print(plain(sys.argv[1]), end="")
