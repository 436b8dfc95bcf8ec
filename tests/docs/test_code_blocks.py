"""Every code block of the README and the docs runs, and shows what the page says it shows.

In a page, ``python`` blocks are executed and ``pycon`` blocks are doctests, in order and in one
namespace. In a doctest ``...`` stands for any text, also in an error's message. The cells of a
notebook are executed as the blocks of a page. The picture of the README is what its programs print.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import distribute_jax as dj

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
RUNNABLE = {"python", "pycon"}
SHOWN = {"bash", "dockerfile", "mermaid", "yaml"}


class Block(NamedTuple):
    """One block of a page: its language, its first line in the page, and its text."""

    kind: str
    line: int
    code: str


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page, or code cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page in NOTEBOOKS:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [Block("python", 0, "".join(cell["source"])) for cell in cells]
    return [
        Block(found["kind"], text.count("\n", 0, found.start("code")), found["code"])
        for found in BLOCK.finditer(text)
    ]


RUN = [page for page in [*PAGES, *NOTEBOOKS] if RUNNABLE & {block.kind for block in blocks(page)}]


def run_block(page: Path, block: Block, namespace: dict[str, Any]) -> str:
    """Runs a block and returns what differs from the page; a failure points at its line there."""
    if block.kind == "python":
        exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)
        return ""
    place = page.name, str(page), block.line
    test = doctest.DocTestParser().get_doctest(block.code, namespace, *place)
    test.globs = namespace  # Not the parser's copy: later blocks see what this one defines.
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=report.append, clear_globs=False)
    return "".join(report) if test.examples else f"no >>> in the block at line {block.line}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_of_a_page_run_in_order_and_show_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in NOTEBOOKS:
        monkeypatch.chdir(tmp_path)  # for the files that it writes
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        wrong = run_block(page, block, namespace) if block.kind in RUNNABLE else ""
        assert not wrong, wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_escapes_by_a_language_that_is_not_run(page: Path) -> None:
    kinds = {block.kind for block in blocks(page)}
    assert kinds <= RUNNABLE | SHOWN
    fences = page.read_text(encoding="utf-8").count("```")
    assert fences == 2 * len(blocks(page)), "a fence without a language, or one that is not closed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_of_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_page_and_notebook_is_in_the_list_of_the_tour() -> None:
    """From which the site makes its sidebar; it is built in CI, and fails there without this."""
    listed = (ROOT / "docs" / "index.md").read_text("utf-8").partition("## All pages")[2]
    pages = {page.name for page in [*PAGES[1:], *NOTEBOOKS]} - {"index.md"}
    assert set(re.findall(r"\]\(([\w/.]+)\)", listed)) == pages


def test_no_notebook_has_outputs() -> None:
    """Which would age; the site can show those of now."""
    for page in NOTEBOOKS:
        cells = json.loads(page.read_text("utf-8"))["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs" / "clusters").iterdir()), ids=lambda f: f.name
)
def test_a_file_for_a_cluster_stands_whole_in_the_page_that_links_it(file: Path) -> None:
    """So that nobody reads, or copies, another version of it than the one that is tested."""
    linking = [page for page in PAGES if f"(clusters/{file.name})" in page.read_text("utf-8")]
    assert len(linking) == 1
    assert file.read_text("utf-8") in [block.code for block in blocks(linking[0])]


@pytest.mark.exhaustive
def test_the_step_of_the_readme_has_one_loss_on_one_device_and_on_eight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, step = (block.code for block in blocks(PAGES[0]) if block.kind == "python")
    names: dict[str, Any] = {}
    exec(first.partition("with strategy.scope():")[0], names)
    losses = []
    for devices in (1, 8):
        names["strategy"] = dj.MirroredStrategy(list(range(devices)))
        exec(step, names)
        found = re.findall(rf"loss (\S+) on {devices} replicas", capsys.readouterr().out)
        losses.append([float(loss) for loss in found])
    one, eight = losses
    assert eight == pytest.approx(one, abs=2e-4)
    assert len(one) == 5
    assert one[-1] < one[0] / 2, "it does not learn"


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
