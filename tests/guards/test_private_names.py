"""What other packages do not promise to keep is used in ``_jax_private.py`` and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import LIBRARY, Module, modules, write_package

QUARANTINE = "_jax_private.py"

ATTRIBUTES = frozenset({"_trace_state", "_pytree__state", "_pytree__nodes", "_raw_value"})
"""Flax's own attributes, which Flax may rename."""

UNPROMISED = ("flax.nnx.graphlib", "flax.nnx.tracers", "flax.nnx.variablelib", "flax.nnx.pytreelib")
"""Public spellings of modules that Flax moves as it likes."""


def private_faults(package: Path) -> Iterator[str]:
    """Returns where a private module or attribute of another package is named outside quarantine."""
    for module in modules(package).values():
        if module.path.name != QUARANTINE:
            yield from _import_faults(module)
            yield from _name_faults(module)


def _import_faults(module: Module) -> Iterator[str]:
    for found in module.imports:
        first, *rest = found.target.split(".")
        private = (
            first != "distribute_jax"
            and first != "__future__"
            and any(part.startswith("_") for part in rest)
        )
        if private or found.target.startswith(UNPROMISED):
            yield f"{module.at(found.line)}: {found.target} belongs into {QUARANTINE}"


def _name_faults(module: Module) -> Iterator[str]:
    for node in module.nodes:
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        text = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", None)
        if (
            dotted == "jax._src"
            or dotted in UNPROMISED
            or (isinstance(text, str) and text in ATTRIBUTES)
        ):
            yield f"{module.at(node.lineno)}: {dotted or text} belongs into {QUARANTINE}"


def test_the_library_uses_private_names_in_the_quarantined_file_only() -> None:
    faults = list(private_faults(LIBRARY))
    assert not faults, "\n".join(faults)


BROKEN = {
    "import": "import jax._src.core",
    "from": "from jax._src import core",
    "inside a function": "def f():\n    from flax._src import a",
    "attribute": "import jax\nx = jax._src.core",
    "graphlib": "from flax.nnx import graphlib",
    "graphlib through nnx": "from flax import nnx\nimport flax\nx = flax.nnx.graphlib",
    "raw value": "def f(v): return v._raw_value",
    "by its text": "def f(v): return getattr(v, '_trace_state')",
    "in a table": "HIDDEN = ('_pytree__state',)",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_private_name_elsewhere_is_reported(case: str, tmp_path: Path) -> None:
    faults = list(private_faults(write_package(tmp_path, {"data/_a.py": BROKEN[case]})))
    assert len(faults) == 1, faults
    assert "data/_a.py:" in faults[0]
    assert list(private_faults(write_package(tmp_path / "q", {QUARANTINE: BROKEN[case]}))) == []
