"""Who may import whom: one order of layers, no cycles, every import at the top of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from layer_picture import BLOCK, PAGE, picture
from source_tree import LIBRARY, OPTIONAL, modules, resolved, write_package

LAYERS = (
    ("_absent", "_errors", "_interrupts"),
    ("_frames",),
    ("_checks",),
    ("_lazy", "_supervision"),
    ("_mesh", "_messages"),
    ("_jax_private",),
    ("_context", "_values"),
    ("_padding",),
    ("cluster_resolver",),
    ("processes",),
    ("collectives", "variables"),
    ("program", "tpu"),
    ("data",),
    ("servers",),
    ("strategies",),
    ("losses", "checkpoint", "summary"),
    ("metrics",),
    ("training", "coordinator"),
    ("launch",),
    ("callbacks", "experimental", "testing"),
    ("cli",),
    ("__init__", "__main__"),
)
"""Each line imports only from lines above it; siblings on a line do not know each other."""

_DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def layer_faults(package: Path) -> Iterator[str]:
    """Returns of each import whether it goes up, sideways or to the package root."""
    known = modules(package)
    for module in known.values():
        own = _part(module.name)
        if own not in _DEPTH:
            yield f"{module.at(1)}: {own} stands in no layer; add it to LAYERS"
            continue
        for found in module.imports:
            target = resolved(found.target, known)
            other = _part(target) if target else own
            if other != own and other in _DEPTH and _DEPTH[other] >= _DEPTH[own]:
                yield f"{module.at(found.line)}: {own} imports {found.target}, not below it"


def _part(module: str) -> str:
    """Returns the folder or file directly below the package that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def cycle_faults(package: Path) -> Iterator[str]:
    """Returns where modules import each other in a circle."""
    known = modules(package)
    reached = {
        module.name: {
            target
            for found in module.imports
            if (target := resolved(found.target, known)) and target != module.name
        }
        for module in known.values()
    }
    try:
        TopologicalSorter(reached).prepare()
    except CycleError as error:
        yield "an import cycle: " + " -> ".join(error.args[1])


def deferred_faults(package: Path) -> Iterator[str]:
    """Returns which imports inside functions are of anything but an optional package."""
    for module in modules(package).values():
        for found in module.imports:
            if found.deferred and found.target.split(".")[0] not in OPTIONAL:
                yield f"{module.at(found.line)}: {found.target} is imported inside a function"


Check = Callable[[Path], Iterator[str]]
CHECKS: tuple[Check, ...] = (layer_faults, cycle_faults, deferred_faults)


@pytest.mark.parametrize("check", CHECKS)
def test_the_library_keeps_the_order_of_imports(check: Check) -> None:
    faults = list(check(LIBRARY))
    assert not faults, "\n".join(faults)


BROKEN = {
    "up": (layer_faults, {"_mesh.py": "from distribute_jax.data import x"}, "_mesh imports"),
    "up in a folder": (
        layer_faults,
        {"data/_a.py": "from distribute_jax.strategies._b import x", "strategies/_b.py": "x = 1"},
        "data imports",
    ),
    "sideways": (
        layer_faults,
        {"_values.py": "from distribute_jax import _context", "_context.py": ""},
        "_values imports",
    ),
    "for type checkers only": (
        layer_faults,
        {"_errors.py": "if TYPE_CHECKING:\n    from distribute_jax import _mesh", "_mesh.py": ""},
        "_errors imports",
    ),
    "relative": (layer_faults, {"data/_a.py": "from ..testing import x"}, "data imports"),
    "the root": (layer_faults, {"data/_a.py": "import distribute_jax as dj"}, "data imports"),
    "no layer": (layer_faults, {"utils.py": ""}, "stands in no layer"),
    "cycle": (
        cycle_faults,
        {
            "data/_a.py": "from distribute_jax.data._b import x",
            "data/_b.py": "from distribute_jax.data import _a",
        },
        "an import cycle",
    ),
    "cycle through a list of names": (
        cycle_faults,
        {
            "data/__init__.py": "from distribute_jax.data._a import x",
            "data/_a.py": "import distribute_jax.data",
        },
        "an import cycle",
    ),
    "deferred": (deferred_faults, {"_mesh.py": "def f():\n    import jax"}, "inside a function"),
    "deferred and nested": (
        deferred_faults,
        {"_mesh.py": "class A:\n    def f(self):\n        if self:\n            import a"},
        "inside a function",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_package_that_breaks_the_order_is_reported_with_its_line(
    case: str, tmp_path: Path
) -> None:
    check, files, wanted = BROKEN[case]
    for name in ("data", "strategies", "testing"):
        files = {f"{name}/__init__.py": "", **files}
    faults = list(check(write_package(tmp_path, files)))
    assert len(faults) == 1, faults
    assert wanted in faults[0]


def test_an_optional_package_may_be_imported_where_it_is_needed(tmp_path: Path) -> None:
    package = write_package(tmp_path, {"data/_a.py": "def f():\n    import grain.python as g"})
    assert [fault for check in CHECKS for fault in check(package)] == []


def test_the_picture_of_the_layers_is_that_of_the_imports() -> None:
    """Otherwise draw it again: ``python tests/guards/layer_picture.py``."""
    (drawn,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert drawn == picture(LIBRARY)
    assert "    program --> collectives\n" in drawn
