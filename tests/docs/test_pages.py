"""The picture of the README is what its programs print; the page on reliability names tests that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def words(picture: Path) -> list[str]:
    """The words of a picture, without numbers, which a machine's speed and JAX's version change."""
    lines = re.findall(r">([^<]*)</text>", picture.read_text("utf-8"))
    return re.sub(r"[\d.,]+(?: m?s\b)?", "0", " ".join(lines).replace("&#160;", " ")).split()


@pytest.mark.exhaustive
def test_the_picture_shows_what_the_programs_of_the_readme_print(tmp_path: Path) -> None:
    """Drawn again it has the same words; otherwise draw it: python docs/images/terminal.py …"""
    images, drawn = ROOT / "docs" / "images", tmp_path / "terminal.svg"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("XLA_FLAGS", "DISTRIBUTE_JAX_VERIFY"):
        environment.pop(name, None)
    command = [sys.executable, str(images / "terminal.py"), str(drawn)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert words(drawn) == words(images / "terminal.svg")
    assert len(words(drawn)) > 100


def test_each_promise_names_tests_that_exist():
    """By their names; a test that is renamed is renamed there."""
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > 30
    assert [name for name in names if f"def {name}(" not in tests] == []
