"""The gallery: on 1 and on 4 replicas each program has the losses of the plain one that it was."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from cases import long
from example_program import ROOT, output

GALLERY = ROOT / "examples" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py") if "  # new\n" in path.read_text("utf-8"))
ROWS = re.findall(
    r"^\| \[(\w+)\]\(.*\| \+(\d+) −(\d+) \|$", (ROOT / "docs/gallery.md").read_text("utf-8"), re.M
)


@pytest.fixture(autouse=True)
def _gallery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs import from their folder."""
    monkeypatch.syspath_prepend(GALLERY)


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They train on 150 examples, so that a batch is partial."""
    import common

    def few(size, steps, *arrays, **options):
        return batches(size, steps, *(array[:150] for array in arrays), **options)

    batches = common.batches
    monkeypatch.setattr(common, "batches", few)


def losses_of(text: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs a program's text for four steps, without dropout."""
    module = ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", module)
    exec(compile(text, "program", "exec"), vars(module))
    module.DROPOUT = 0.0
    return module.train(devices, 4)[0]


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize(("name", "replicas"), [long(name, n) for name in NAMES for n in (1, 4)])
def test_a_program_has_the_losses_of_the_plain_flax_program(
    name: str, replicas: int, monkeypatch: pytest.MonkeyPatch
):
    """To 1e-5, partial batches included; the plain one is the program with its marked lines put back."""
    import plain

    expected = losses_of(plain.plain(name), 1, monkeypatch)
    assert not re.search(r"\bdj\b", plain.plain(name))
    assert len(set(expected)) == 4
    np.testing.assert_allclose(
        losses_of(plain.source(name), replicas, monkeypatch), expected, rtol=1e-5
    )


def test_the_page_has_the_lines_that_each_program_changes():
    """As the marks count them."""
    import plain

    rows = [(name, *map(str, plain.changed(name))) for name in NAMES]
    assert sorted(ROWS) == rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_command_prints_its_result_and_time(name: str, tmp_path: Path):
    """On four devices; the loss falls, if it is not that of two opponents."""
    printed = output(f"gallery/{name}", "--devices=4", folder=tmp_path)
    found = re.search(r"loss (\S+) → (\S+), \d+ steps on 4 devices in \d+ s \(", printed)
    assert found is not None
    assert float(found[2]) < float(found[1]) or name == "gan"
