"""The page on reliability names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_promise_names_tests_that_exist():
    """By their names; a test that is renamed is renamed there."""
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > 30
    assert [name for name in names if f"def {name}(" not in tests] == []
