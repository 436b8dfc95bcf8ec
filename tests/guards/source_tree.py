"""The package as text: its modules, what each imports, and its functions, without running any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "distribute_jax"

OPTIONAL = frozenset(
    {
        "IPython",
        "PIL",
        "fsspec",
        "google",
        "grain",
        "kubernetes",
        "matplotlib",
        "orbax",
        "pandas",
        "ray",
        "requests",
        "rich",
        "sklearn",
        "tensorboardX",
        "tensorflow",
        "torch",
        "urllib3",
    }
)
"""Third-party packages that may be missing, or take a second to import, as Grain does, so that only the
function that needs one imports it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module, with the line that imports it."""

    target: str
    """The full dotted name: a module, or a name in one."""
    line: int
    deferred: bool
    """Whether the import stands inside a function."""


@dataclass(frozen=True)
class Module:
    """One source file of the package."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the source."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, those for type checkers and those inside functions included."""
        inside = {id(node) for f in self.functions for node in ast.walk(f) if node is not f}
        return [
            Import(target, node.lineno, id(node) in inside)
            for node in self.nodes
            for target in self._targets(node)
        ]

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in self.nodes if isinstance(node, kinds)]

    def at(self, line: int) -> str:
        """Returns a place in this file for a message, as an editor takes it."""
        return f"{'/'.join(self.path.parts[-2:])}:{line}"

    def _targets(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            yield from (f"{base}.{alias.name}" for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        levels = node.level - (self.path.name == "__init__.py")
        package = self.name.rsplit(".", levels)[0] if levels else self.name
        return f"{package}.{node.module}" if node.module else package


@cache
def modules(package: Path) -> dict[str, Module]:
    """Returns every module of a package by its dotted name; the folder's name is the package's.

    Each package is read once, so that all guards share what was parsed.
    """
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def resolved(target: str, known: dict[str, Module]) -> str | None:
    """Returns the module of the package that an import reaches: the longest prefix that is one."""
    parts = target.split(".")
    while parts:
        if ".".join(parts) in known:
            return ".".join(parts)
        parts.pop()
    return None


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Writes a small package named ``distribute_jax``, so that a check can be seen to fail."""
    package = folder / "distribute_jax"
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        (path.parent / "__init__.py").touch()
    return package
