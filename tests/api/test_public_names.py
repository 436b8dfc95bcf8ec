"""Every public name is listed once, sorted, documented, typed, and shows its public module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from public_names import annotation_faults, docstring_faults, list_faults, module_faults

import distribute_jax as dj

Check = Callable[[ModuleType], Iterator[str]]
CHECKS: tuple[Check, ...] = (list_faults, docstring_faults, module_faults, annotation_faults)


@pytest.mark.parametrize("check", CHECKS)
def test_the_public_names_of_the_library_are_in_order(check: Check) -> None:
    faults = list(check(dj))
    assert not faults, "\n".join(faults)


def test_dir_of_a_public_module_is_what_it_lists() -> None:
    for module in (dj, dj.callbacks, dj.coordinator, dj.losses, dj.metrics, dj.summary):
        assert dir(module) == sorted(module.__all__)


GOOD = '''
def f(x: int) -> int:
    """Adds.

    Args:
        x: a number.

    Returns:
        Another one.
    """

class A:
    """Adds."""

    def g(self, x: int) -> int:
        """Adds."""

__all__ = ["A", "f"]
'''

BROKEN = {
    "unsorted": (list_faults, ('["A", "f"]', '["f", "A"]'), "not sorted"),
    "twice": (list_faults, ('["A", "f"]', '["A", "A", "f"]'), "lists a name twice"),
    "absent": (list_faults, ('["A", "f"]', '["A", "f", "g"]'), "cannot be imported"),
    "unlisted": (list_faults, ('["A", "f"]', '["f"]'), "not in __all__"),
    "unlisted import": (list_faults, ("class A", "import math as math\nclass A"), "not in __all__"),
    "class": (docstring_faults, ('class A:\n    """Adds."""', "class A:"), "A has no docstring"),
    "dataclass": (
        docstring_faults,
        ('class A:\n    """Adds."""', "import dataclasses\n@dataclasses.dataclass\nclass A:"),
        "A has no docstring",
    ),
    "method": (docstring_faults, ('int:\n        """Adds."""', "int: ..."), "A.g has no docstring"),
    "argument": (docstring_faults, ("x: a number", "y: a number"), "['y'] but takes ['x']"),
    "module": (module_faults, ("class A:", "class A:\n    __module__ = 'sample._a'"), "sample._a"),
    "untyped": (annotation_faults, ("f(x: int)", "f(x)"), "f has no type for x"),
    "untyped result": (annotation_faults, ("g(self, x: int) -> int", "g(self, x: int)"), "result"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_name_that_breaks_a_rule_is_reported(case: str, tmp_path: Path) -> None:
    check, (old, new), wanted = BROKEN[case]
    assert old in GOOD
    faults = list(check(_sample(tmp_path, GOOD.replace(old, new))))
    assert len(faults) == 1, faults
    assert wanted in faults[0]


def test_names_that_keep_the_rules_are_not_reported(tmp_path: Path) -> None:
    sample = _sample(tmp_path, GOOD)
    assert [fault for check in CHECKS for fault in check(sample)] == []


def _sample(folder: Path, text: str) -> ModuleType:
    (folder / "sample.py").write_text(text)
    spec = importlib.util.spec_from_file_location("sample", folder / "sample.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sample"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        return module
    finally:
        del sys.modules["sample"]
