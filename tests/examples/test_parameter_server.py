"""The example of parameter servers: it learns, and applies each step once, also when processes are killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_program import output


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [["--workers", 2], ["--engine", "processes", "--kill"]])
def test_it_learns_and_loses_no_update(options: list[object], tmp_path: Path) -> None:
    """8 epochs of 22 steps are 176 updates; the program fails by itself when there are more or fewer."""
    text = output("parameter_server", "--epochs", 8, *options, folder=tmp_path)
    assert "176 updates;" in text
    (accuracy,) = re.findall(r"Test accuracy: ([0-9.]+)", text)
    assert float(accuracy) > 0.85
