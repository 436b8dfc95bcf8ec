"""The size budget, and the marks of unfinished work that no file may carry."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_tree import LIBRARY, Function, Module, modules, write_package

FILE_LINES = 500
BODY_LINES = 60
BODY_LINES_P90 = 25

_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

ASSERTS: dict[str, str] = {
    "program/_trace.py": "for the type checker: the results exist once the step was traced"
}
"""Files that may hold an ``assert``, with the reason why it is not about the user's input."""


def size_faults(package: Path) -> Iterator[str]:
    """Returns which files and functions are too long."""
    lengths = []
    for module in modules(package).values():
        lines = module.text.count("\n")
        if lines > FILE_LINES:
            yield f"{module.at(1)}: {lines} lines; at most {FILE_LINES}"
        for function in module.functions:
            lengths.append(body_lines(function))
            if lengths[-1] > BODY_LINES:
                yield f"{module.at(function.lineno)}: {function.name} has {lengths[-1]} lines"
    p90 = sorted(lengths)[len(lengths) * 9 // 10] if lengths else 0
    if p90 > BODY_LINES_P90:
        yield f"one function in ten has {p90} lines or more; at most {BODY_LINES_P90}"


def body_lines(function: Function) -> int:
    """Counts the lines of a function below its signature and docstring."""
    documented = ast.get_docstring(function) is not None
    body = function.body[1:] if documented else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def unfinished_faults(package: Path) -> Iterator[str]:
    """Returns where a file carries a note of work to do, or raises an error without text."""
    for module in modules(package).values():
        for number, line in enumerate(module.text.splitlines(), 1):
            if _UNFINISHED.search(line):
                yield f"{module.at(number)}: {line.strip()}; open an issue instead"
        for node in module.nodes:
            if isinstance(node, ast.Raise) and _is_bare(node.exc):
                yield f"{module.at(node.lineno)}: NotImplementedError without a text"


def _is_bare(raised: ast.expr | None) -> bool:
    if isinstance(raised, ast.Call):
        return not raised.args and _is_bare(raised.func)
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def assert_faults(package: Path) -> Iterator[str]:
    """Returns where an ``assert`` stands: python -O drops it, and it explains nothing to a user."""
    for module in modules(package).values():
        if module.path.relative_to(package).as_posix() not in ASSERTS:
            yield from _asserts(module)


def _asserts(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Assert):
            yield f"{module.at(node.lineno)}: assert; raise an error that says what to do"


Check = Callable[[Path], Iterator[str]]
CHECKS: tuple[Check, ...] = (size_faults, unfinished_faults, assert_faults)


@pytest.mark.parametrize("check", CHECKS)
def test_the_library_keeps_to_the_budget(check: Check) -> None:
    faults = list(check(LIBRARY))
    assert not faults, "\n".join(faults)


def test_every_exemption_for_assert_is_still_needed() -> None:
    known = {m.path.relative_to(LIBRARY).as_posix(): m for m in modules(LIBRARY).values()}
    assert [name for name in ASSERTS if not any(_asserts(known[name]))] == []


LONG = "def f():\n    '''Says.'''\n" + "    x = 1\n" * 61
MIDDLING = "".join(f"def f{i}():\n" + "    x = 1\n" * 26 for i in range(5))
BROKEN = {
    "file": (size_faults, "x = 1\n" * 501, "501 lines"),
    "function": (size_faults, LONG + "def g(): pass\n" * 10, "f has 61 lines"),
    "p90": (size_faults, MIDDLING, "one function in ten has 26"),
    "note": (unfinished_faults, "x = 1  # TO" + "DO: more", "open an issue"),
    "bare": (unfinished_faults, "def f():\n    raise NotImplementedError", "without a text"),
    "bare call": (unfinished_faults, "def f():\n    raise NotImplementedError()", "without a text"),
    "assert": (assert_faults, "def f(x):\n    assert x > 0", "raise an error"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_over_the_budget_is_reported(case: str, tmp_path: Path) -> None:
    check, text, wanted = BROKEN[case]
    faults = list(check(write_package(tmp_path, {"data/_a.py": text})))
    assert len(faults) == 1, faults
    assert wanted in faults[0]


def test_a_docstring_does_not_count_as_length(tmp_path: Path) -> None:
    text = "def f():\n    '''Says.\n" + "    more\n" * 80 + "    '''\n    return 1\n"
    assert list(size_faults(write_package(tmp_path, {"_a.py": text}))) == []
