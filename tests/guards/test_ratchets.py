"""What may only fall: lines of library and tests, files that belong into a sibling, private words.

A limit is lowered with the commit that makes it possible. It goes up only with the reason in the commit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from source_tree import LIBRARY, Module, modules, resolved, write_package

ROOT = LIBRARY.parent

WORDS = re.compile(
    r"""\blies\b|\bparted\b|\bgiven\ away\b|\balike\b|\banew\b|\btold\ to\ end\b
    |\bwhich\ is\ no\b|(?<!there\ )(?<!There\ )\bis\ no\ (?!longer|more\b|other|such|one\b)
    |(?<!there\ )\bis\ none\b|\bof\ its\ own\b|\bTells\b|^\s*(?:\"\"\"|\#\ )(?:Gives|Says)\b""",
    re.VERBOSE | re.MULTILINE,
)
"""Words for which the field has others, as CONTRIBUTING says."""

SMALL = 120
"""A file with fewer lines that one sibling alone imports belongs into that sibling."""


def lines(package: Path) -> list[str]:
    """Returns every line of the library."""
    return [line for m in modules(package).values() for line in m.text.splitlines()]


def files(package: Path) -> list[str]:
    """Returns every file of the library."""
    return [m.name for m in modules(package).values()]


def pieces(package: Path) -> list[str]:
    """Returns the small files that exactly one other file imports, which stands beside them."""
    known = modules(package)
    importers: dict[str, set[str]] = defaultdict(set)
    for module in known.values():
        for found in module.imports:
            target = resolved(found.target, known)
            if target and target != module.name:
                importers[target].add(module.name)
    return [
        f"{module.name}, which only {importer} imports"
        for module in known.values()
        if module.text.count("\n") < SMALL and module.path.name != "__init__.py"
        for importer in importers[module.name]
        if len(importers[module.name]) == 1 and _are_siblings(module, known[importer])
    ]


def _are_siblings(module: Module, other: Module) -> bool:
    return module.path.parent == other.path.parent and other.path.name != "__init__.py"


def private_words(package: Path) -> list[str]:
    """Returns the places in code, tests, benchmarks and docs that contain a private word."""
    root = package.parent
    texts = [
        path
        for pattern in ("*.md", "*.py", "docs/**/*.md", "examples/**/*.py", "tests/**/*.py")
        for path in sorted(root.glob(pattern))
    ]
    texts += [m.path for m in modules(package).values()]
    texts += sorted((root / "benchmarks").glob("*.py"))
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in texts
        if path.name not in ("test_ratchets.py", "CONTRIBUTING.md")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]


def private_imports(package: Path) -> list[str]:
    """Returns where a test imports a private module of another package than the one it tests."""
    found = []
    for path in sorted((package.parent / "tests").rglob("*.py")):
        tested = path.relative_to(package.parent / "tests").parts[0]
        for line in path.read_text(encoding="utf-8").splitlines():
            match = re.match(r"\s*(?:from|import) distribute_jax\.(\w+)(?:\.(\w+))?", line)
            part, inner = match.groups() if match else ("", None)
            private = part.startswith("_") or (inner or "").startswith("_")
            if private and part != tested and not tested.endswith(".py"):
                found.append(f"{path.name}: {line.strip()}")
    return found


def lines_of_tests(package: Path) -> list[str]:
    """Returns every line of the tests, which are to be no longer than the library."""
    paths = sorted((package.parent / "tests").rglob("*.py"))
    return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


LIMITS: dict[Callable[[Path], list[str]], int] = {
    lines: 51_960,
    lines_of_tests: 51_874,
    files: 205,
    pieces: 0,
    private_words: 0,
    private_imports: 32,
}


@pytest.mark.parametrize("measure", LIMITS, ids=lambda measure: measure.__name__)
def test_what_may_only_fall_has_not_grown(measure: Callable[[Path], list[str]]) -> None:
    """More than the limit is more than there was when somebody last looked at all of it."""
    measured = measure(LIBRARY)
    shown = "\n".join(measured if len(measured) < 400 else measured[-20:])
    assert len(measured) <= LIMITS[measure], f"{len(measured)}, at most {LIMITS[measure]}:\n{shown}"


CASES = {
    "lines": (lines, {"_a.py": "x = 1\ny = 2\n"}, 2),
    "files": (files, {"_a.py": ""}, 2),
    "a piece": (pieces, {"data/_a.py": "from distribute_jax.data import _b", "data/_b.py": ""}, 1),
    "shared": (
        pieces,
        dict.fromkeys(("data/_a.py", "data/_c.py"), "from distribute_jax.data import _b")
        | {"data/_b.py": ""},
        0,
    ),
    "a piece of another package": (
        pieces,
        {"tpu/_a.py": "from distribute_jax.data import _b", "data/_b.py": ""},
        0,
    ),
    "a long file": (
        pieces,
        {"data/_a.py": "from distribute_jax.data import _b", "data/_b.py": "\n" * SMALL},
        0,
    ),
    "a word": (private_words, {"_a.py": '"""Gives x."""\ny = "x is no list"\nz = "relies"\n'}, 2),
    "no word": (private_words, {"_a.py": '"""Returns x; there is no list."""\n'}, 0),
    "a test": (lines_of_tests, {"_a.py": "", "../tests/data/test_a.py": "x = 1\ny = 2\n"}, 2),
    "a test's import": (
        private_imports,
        {"../tests/data/test_a.py": "from distribute_jax.program._b import x\n"},
        1,
    ),
    "of the package it tests": (
        private_imports,
        {"../tests/data/test_a.py": "from distribute_jax.data._b import x\n"},
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_of_them_is_counted(case: str, tmp_path: Path) -> None:
    """On a small package that is known."""
    measure, texts, wanted = CASES[case]
    package = write_package(tmp_path, texts)
    assert len(measure(package)) == wanted, measure(package)
