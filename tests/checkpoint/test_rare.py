"""Rare cases: races with other programs, odd trees, odd file systems."""

from __future__ import annotations

import errno
import functools
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.checkpoint import _storage, load, save
from distribute_jax.checkpoint._storage import DiskDirectory


@pytest.fixture
def manager(tmp_path: Path) -> dj.CheckpointManager:
    """A manager with the steps 1 and 2."""
    made = dj.CheckpointManager(tmp_path)
    for step in (1, 2):
        made.save(step, {"x": np.full(3, step)})
    made.wait()
    return made


def test_processes_that_are_not_connected_are_refused(
    manager: dj.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a strategy that connects them, each would write the same files."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(dj.UnsupportedError, match=r"2 processes .*Make dj.MultiWorkerMirrored"):
        manager.save(3, {"x": 1})


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node whose two children have the same name."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten_with_keys(self) -> Any:
        """Names both the same."""
        key = jax.tree_util.GetAttrKey("twin")
        return [(key, child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Twins:
        """Puts them back."""
        return cls(*children)


def test_leaves_with_the_same_path_are_refused(tmp_path: Path) -> None:
    """One of them would be restored into both."""
    with pytest.raises(dj.CheckpointError, match=r"(?s)the same path:.*\['t'\]\.twin"):
        save(tmp_path / "c", {"t": Twins(1, 2)})


def test_a_tree_that_contains_itself_is_refused_in_one_line(manager: dj.CheckpointManager) -> None:
    """Two ways into the cycle; a RecursionError of JAX would leave Python without recursion on 3.11."""
    cycle: dict[str, Any] = {"x": np.zeros(2)}
    cycle |= {"again": cycle, "list": [cycle]}
    message = r"^The tree has more than 200 levels at \['again'\]\['again'\].*contains itself.*\.$"
    for call in (functools.partial(manager.save, 3), manager.restore_latest):
        with pytest.raises(dj.CheckpointError, match=message):
            call(cycle)
    shared = np.ones(3)
    assert manager.save(3, {"x": shared, "same": [shared, {"shared": shared}]})


def test_a_step_that_another_program_removes_meanwhile_is_skipped_silently(
    tmp_path: Path, manager: dj.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was pruned, not damaged."""
    read = DiskDirectory.read

    def removed(directory: DiskDirectory, path: str) -> bytes:
        if path.startswith("2/"):
            shutil.rmtree(directory.path / "2", ignore_errors=True)
        return read(directory, path)

    monkeypatch.setattr(DiskDirectory, "read", removed)
    tree = {"x": np.zeros(3, int)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.restore_latest(tree) == 1
    assert tree["x"].tolist() == [1, 1, 1]
    DiskDirectory(tmp_path).remove("2")  # as where both prune: no error


def failing(code: int) -> Any:
    """Returns a function that fails as a system call does."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, "refused")

    return fail


def test_an_old_step_that_cannot_be_removed_is_reported(
    manager: dj.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is there, and the directory grows."""
    full = dj.CheckpointManager(manager.directory, max_to_keep=1)
    monkeypatch.setattr(DiskDirectory, "remove", failing(errno.EACCES))
    full.save(3, {"x": np.zeros(3)})
    with pytest.raises(dj.CheckpointFileError, match=r"3 was written, but an older step"):
        full.wait()
    assert full.all_steps() == [1, 2, 3]


def test_saving_works_on_a_file_system_without_locks(
    manager: dj.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of killed programs are removed too."""
    monkeypatch.setattr(_storage.fcntl, "flock", failing(errno.ENOSYS))
    (manager.directory / ".9.0123abcd.saving").mkdir()
    (manager.directory / ".9.0123abcd.saving" / "lock").touch()
    manager.save(3, {"x": np.zeros(3)})
    manager.save(3, {"x": np.ones(3)}, force=True)
    manager.wait()
    assert sorted(path.name for path in manager.directory.iterdir()) == ["1", "2", "3"]


def test_a_folder_that_stays_locked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a hundred tries, not never."""

    def busy(*_: Any) -> None:
        raise BlockingIOError

    monkeypatch.setattr(_storage.fcntl, "flock", busy)
    with pytest.raises(dj.CheckpointFileError, match="could be locked"):
        save(tmp_path / "c", {"x": 1})


@pytest.mark.parametrize("before", ["open", "_lock"])
def test_a_folder_that_is_removed_before_it_is_locked_is_recreated(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took it for a draft of a killed program."""
    module: Any = _storage.os if before == "open" else _storage
    function, times = getattr(module, before), []

    def slow(*args: Any, **kinds: Any) -> Any:
        lock = list(tmp_path.glob(".c.*/lock")) if before == "_lock" else [Path(str(args[0]))]
        if not times and lock and lock[0].name == "lock":
            times.append(lock)
            shutil.rmtree(lock[0].parent)
        return function(*args, **kinds)

    monkeypatch.setattr(module, before, slow)
    save(tmp_path / "c", {"x": 1})
    assert len(times) == 1
    assert load(tmp_path / "c", {"x": 0}) == {"x": 1}


def test_arrays_that_orbax_does_not_find_are_damaged(
    manager: dj.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the files are those of the manifest, of another checkpoint."""
    monkeypatch.setattr(_storage, "check_files", lambda *_: None)
    (arrays,) = (manager.directory / "2").glob("arrays-*/whole-0")
    shutil.rmtree(arrays)
    with pytest.raises(dj.CheckpointDamagedError, match="Orbax cannot read"):
        manager.restore(2, {"x": np.zeros(3, int)})
    save(manager.directory / "other", {"x": np.zeros(4)})
    shutil.copytree(next((manager.directory / "other").glob("arrays-*/whole-0")), arrays)
    with pytest.raises(dj.CheckpointDamagedError, match=r"has the shape \(4,\), not \(3,\)"):
        manager.restore(2, {"x": np.zeros(3, int)})
