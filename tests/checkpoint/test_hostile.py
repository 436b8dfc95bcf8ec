"""A malicious checkpoint with correct digests ends in an error of the library."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.checkpoint import _orbax, _storage, load, save

HUGE = 1 << 42


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """Reading a pipe would block the tests."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tree(number: float) -> dict[str, Any]:
    """Arrays, a Python float and a text."""
    return {"a": np.full((2, 3), number, np.float32), "rate": number, "name": f"{number}"}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A directory with the steps 1 and 2."""
    with dj.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, tree(float(step)))
            manager.wait()
    return tmp_path / "run"


def edit(steps: Path, change: Callable[[Any], Any]) -> None:
    """Changes the manifest of step 2, and its digest accordingly."""
    file = steps / "2" / "manifest.json"
    content = json.loads(file.read_text())["content"]
    content = change(content) or content
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(plain.encode()).hexdigest()
    file.write_text(json.dumps({"sha256": sha256, "content": content}))


def leaf(content: Any, path: str) -> Any:
    """The entry of a leaf."""
    return next(one for one in content["leaves"] if one["spec"]["path"] == f"['{path}']")


def falls_back(steps: Path) -> str:
    """Step 1 is restored with a warning, whose text is returned."""
    state = tree(0.0)
    with pytest.warns(RuntimeWarning, match="step 2 is damaged and was set aside") as warned:
        assert dj.CheckpointManager(steps).restore_latest(state) == 1
    assert (state["a"] == 1).all()
    assert (state["rate"], state["name"]) == (1.0, "1.0")
    return str(warned[0].message)


def set_in(path: str, key: str, value: Any) -> Callable[[Any], None]:
    """Returns a change of one field of a leaf's entry; of its spec, or its part, with a dot."""

    def change(content: Any) -> None:
        entry, *last = leaf(content, path), *key.split(".")
        if len(last) == 2:
            entry = entry["spec"] if last[0] == "spec" else entry["parts"][0]
        entry[last[-1]] = value

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "not an object": lambda content: [1],
    "no format": lambda content: content.pop("format") and None,
    "no leaves": lambda content: content.pop("leaves") and None,
    "leaves of another kind": lambda content: content.update(leaves=3),
    "files of another kind": lambda content: content.update(files=["x"]),
    "arrays of another kind": lambda content: content.update(arrays=7),
    "an unknown field": lambda content: content.update(more=1),
    "no spec": lambda content: leaf(content, "a").pop("spec") and None,
    "no dtype": set_in("a", "dtype", ""),
    "another dtype": set_in("a", "dtype", "float64"),
    "a dtype of objects": set_in("a", "dtype", "O"),
    "a huge shape": set_in("a", "shape", [HUGE, 3]),
    "a part of a huge shape": set_in("a", "part.shape", [HUGE, 3]),
    "a part elsewhere": set_in("a", "part.start", [5, 0]),
    "a part before the start": set_in("a", "part.start", [-1, 0]),
    "a size that is not a number": set_in("a", "part.shape", ["x", 3]),
    "a size of 0.5": set_in("a", "shape", [0.5, 12]),
    "no parts": set_in("a", "parts", []),
    "a part above": set_in("a", "part.name", "../../1/manifest.json"),
    "a part at the root": set_in("a", "part.name", "/etc/passwd"),
    "a folder above": set_in("a", "part.folder", ".."),
    "a file above": lambda content: content["files"].update({"whole-0/../../x": "0"}),
    "a file at the root": lambda content: content["files"].update({"whole-0//etc/passwd": "0"}),
    "a text for a float": set_in("rate", "text", "xyz"),
    "a list for a float": set_in("rate", "text", [1]),
    "a number for a text": set_in("name", "text", 5),
    "another kind": set_in("rate", "spec.kind", "other"),
    "no path": set_in("rate", "spec.path", None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_manifest_that_contradicts_itself_is_damaged(steps: Path, case: str) -> None:
    """Nothing is allocated or opened for it, and the step before is used."""
    edit(steps, CHANGES[case])
    if case == "no path":  # it does not fit, and says so
        with pytest.raises(dj.CheckpointError, match="does not fit"):
            dj.CheckpointManager(steps).restore_latest(tree(0.0))
        return
    falls_back(steps)


def in_parts(steps: Path, content: Any) -> Path:
    """Makes the array of step 2 a part as another process writes them; returns its file."""
    file = steps / "2" / content["arrays"] / "parts-1" / "0"
    file.parent.mkdir()
    file.write_bytes(np.full((2, 3), 2.0, np.float32).tobytes())
    leaf(content, "a")["parts"][0].update(folder="parts-1", name="0")
    content["files"]["parts-1/0"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return file


def replaced(path: Path, make: Callable[[Path], Any]) -> None:
    """Replaces a file or folder by something else."""
    path.rename(path.parent.parent / "moved")
    make(path)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to(path.parent.parent / "moved"),
    "a large file": lambda path: (path.touch(), os.truncate(path, HUGE)),
}


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        *itertools.product(["manifest", "part"], SPECIAL),
        *itertools.product(["file of Orbax", "arrays", "step"], ["a pipe", "a link"]),
    ],
)
def test_pipes_links_and_sparse_files_are_not_read(steps: Path, what: str, kind: str) -> None:
    """Nothing waits for a pipe, follows a link or reads a sparse file of terabytes."""
    files: list[Path] = []
    edit(steps, lambda content: files.append(in_parts(steps, content)))
    (part,) = files
    paths = {
        "manifest": steps / "2" / "manifest.json",
        "part": part,
        "file of Orbax": part.parent.parent / "whole-0" / "manifest.ocdbt",
        "arrays": part.parent.parent,
        "step": steps / "2",
    }
    if what == "file of Orbax":
        edit(steps, lambda content: leaf(content, "a")["parts"][0].update(folder="whole-0"))
    replaced(paths[what], SPECIAL[kind])
    if what == "step" and kind == "a pipe":  # not a folder, so not a step
        assert dj.CheckpointManager(steps).restore_latest(tree(0.0)) == 1
        return
    text = falls_back(steps)
    assert kind != "a link" or "is a link" in text or "neither a file nor a folder" in text


@pytest.mark.exhaustive
def test_orbax_arrays_larger_than_in_the_manifest_are_not_read(steps: Path) -> None:
    """A gigabyte of zeros takes some kilobytes on the disk."""

    def change(content: Any) -> None:
        folder = steps / "2" / content["arrays"] / "whole-0"
        name = leaf(content, "a")["parts"][0]["name"]
        shutil.rmtree(folder)
        _orbax.write_arrays(folder, {name: np.zeros(1 << 28, np.float32)})
        content["files"] = {f"whole-0/{f}": d for f, d in _storage.digests(folder).items()}

    edit(steps, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "has the shape (268435456,), not (2, 3)" in falls_back(steps)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_the_path_of_the_user_may_be_a_link(tmp_path: Path) -> None:
    """As ``latest`` often is."""
    save(tmp_path / "a", tree(3.0))
    (tmp_path / "latest").symlink_to(tmp_path / "a")
    assert load(tmp_path / "latest", tree(0.0))["rate"] == 3.0
