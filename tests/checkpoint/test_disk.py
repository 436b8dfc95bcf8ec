"""Programs that are killed while they save, and disks that fail."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kill_saves import checked, state_of

import distribute_jax as dj
from distribute_jax.checkpoint import _orbax, _read, _storage, _write, load, save
from distribute_jax.checkpoint._storage import DiskDirectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def output_of(program: str, *arguments: str) -> tuple[str, str]:
    """Runs a program of this folder; returns its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, program if program == "-c" else str(HERE / program), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.exhaustive
def test_a_killed_program_leaves_complete_steps(tmp_path: Path) -> None:
    """Killed at random moments of a save: the newest step is complete and bitwise what was saved."""
    kills = 100
    printed, _ = output_of("kill_saves.py", str(tmp_path), str(kills), "0")
    found = printed.split("\n")[:-1]
    assert len(found) == kills
    assert all(line.startswith("restored ") for line in found), printed
    steps, unfinished = zip(*[map(int, line.split()[1::2]) for line in found], strict=True)
    assert list(steps) == sorted(steps)
    assert steps[-1] >= kills - 1, "each of them had begun three saves, and so done one"
    assert sum(unfinished) > kills // 4, "the kills came in the middle of saves"
    assert max(unfinished) == 1, "what one save leaves, the next one removes"
    manager = dj.CheckpointManager(tmp_path, max_to_keep=2)
    step = checked(manager)
    manager.save(step + 1, state_of(step + 1))
    manager.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([str(step), str(step + 1)])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory with a space and an accent, which an unprivileged program can reach too."""
    with tempfile.TemporaryDirectory(prefix="checkpoint of ü ") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "steps of é"


def test_a_full_or_read_only_disk_leaves_older_steps_intact(open_folder: Path) -> None:
    """The error names path and bytes; older steps are intact; no file of the failed save is left."""
    printed, _ = output_of("fill_disk.py", str(open_folder))
    for case, found in json.loads(printed).items():
        reason, needs = {
            "full": ("File too large", "It needs 3000000 bytes, and "),
            "read-only": ("Permission denied", "\nNothing of it"),
        }[case]
        raised, warned, single = (found["results"][name] for name in ("raise", "warn", "save"))
        assert len(warned["warned"]) == 2, "one for each save"
        for text in (raised["error"], *warned["warned"], single["error"]):
            assert "could not be written" in text
            assert needs in text
            assert reason in text
            assert "Remove the cause, or save to another directory." in text
        assert f"{open_folder / '3'} could not" in raised["error"]
        assert {"CheckpointFileError", "OSError", "ValueError"} <= set(raised["types"])
        assert (raised["warned"], warned["error"]) == ([], "")
        assert found["grown"] == 0
        assert found["same"] == [True] * 3
        assert found["names"] == ["1", "2"]
        assert found["beside"] == ["one", open_folder.name]


def full(*_: Any, **__: Any) -> None:
    """Fails as a write to a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


BREAKS: dict[str, Any] = {
    "write_arrays": _write,
    "make_record": _write,
    "manifest_text": _write,
    "sync": _storage,
    "sync_all": _storage,
    "_replace": DiskDirectory,
}
"""What a save calls, and where."""


@pytest.mark.parametrize("where", BREAKS)
def test_a_save_that_fails_anywhere_leaves_the_old_checkpoint(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and after the files of the new one."""
    save(tmp_path / "c", {"x": np.zeros(3)})
    with monkeypatch.context() as broken:
        broken.setattr(BREAKS[where], where, full)
        with pytest.raises(dj.CheckpointFileError, match=r"(?s)No space left.*needs 24 bytes"):
            save(tmp_path / "c", {"x": np.ones(3)})
    assert load(tmp_path / "c", {"x": np.full(3, 5.0)})["x"].tolist() == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_only_a_full_disk_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_write, "manifest_text", fail)
    with pytest.raises(dj.CheckpointFileError, match="Remove the cause") as raised:
        save(tmp_path / "c", {"x": np.ones(3)})
    assert "It needs" not in str(raised.value)


def test_a_failed_save_is_reported_once_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call after it raises or warns; the one after that saves again."""
    raising = dj.CheckpointManager(tmp_path / "r")
    warning = dj.CheckpointManager(tmp_path / "w", on_error="warn")
    for manager in (raising, warning):
        with monkeypatch.context() as broken:
            broken.setattr(_write, "manifest_text", full)
            assert manager.save(1, {"x": 1})
            manager._background.join()
    with pytest.raises(OSError, match=r"(?s)r/1 could not be written: OSError: .*No space left"):
        raising.save(2, {"x": 1})
    with pytest.warns(RuntimeWarning, match=r"(?s)w/1 could not .*Training continues") as caught:
        assert warning.save(2, {"x": 1})
    assert caught[0].filename == __file__
    assert raising.save(2, {"x": 1})
    for manager in (raising, warning):
        manager.wait()
        assert manager.all_steps() == [2]


def test_the_end_of_the_with_block_reports_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises; an error of the block itself is raised instead, with a warning about the save."""
    monkeypatch.setattr(_write, "manifest_text", full)
    with (
        pytest.raises(dj.CheckpointFileError, match="No space left"),
        dj.CheckpointManager(tmp_path) as manager,
    ):
        manager.save(1, {"x": 1})

    def failing() -> None:
        with dj.CheckpointManager(tmp_path) as manager:
            manager.save(2, {"x": 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning, match="No space left"):
        failing()


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    """With the message of the system."""
    with pytest.raises(dj.CheckpointFileError, match=r"(?s)x{300}.*too long"):
        save(tmp_path / ("x" * 300) / "model", {"a": 1})


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_is_a_file_is_reported_as_on_error_says(name: str, tmp_path: Path) -> None:
    """With its path and what helps; listing the steps raises too."""
    (tmp_path / "file").touch()
    tree = {"x": np.ones(5)}
    manager = dj.CheckpointManager(tmp_path / name)
    warning = dj.CheckpointManager(tmp_path / name, on_error="warn")
    needs = rf"(?s){tmp_path / name / '7'} could not be written: .*{tmp_path}.*Remove the cause"
    for each in (manager, warning):
        assert each.save(7, tree)
    with pytest.raises(dj.CheckpointFileError, match=needs):
        manager.wait()
    with pytest.warns(RuntimeWarning, match=needs):
        warning.wait()
    for call in (lambda: manager.restore_latest(tree), manager.all_steps):
        with pytest.raises(
            dj.CheckpointFileError, match=rf"{name} cannot be read.*Not a directory"
        ):
            call()
    with pytest.raises(dj.CheckpointFileError, match=r"is a file|File exists"):
        save(tmp_path / name, tree)


def test_a_folder_without_read_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of the library, although ``Path.exists`` raises."""
    save(tmp_path / "model", {"x": 1})

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    monkeypatch.setattr(DiskDirectory, "read", refuse)
    with pytest.raises(dj.CheckpointFileError, match=r"model cannot be read: .*denied"):
        load(tmp_path / "model", {"x": 1})


def test_a_step_without_read_permission_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error that says so, and nothing is set aside; as where too many files are open."""
    manager = dj.CheckpointManager(tmp_path)
    manager.save(1, {"x": np.zeros(2)})
    manager.wait()

    def refused(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    readers = (DiskDirectory, "read"), (_read, "read_arrays"), (_orbax, "_as_numpy")
    for (owner, name), code in itertools.product(readers, (errno.EACCES, errno.EMFILE)):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, refused)
            with pytest.raises(
                dj.CheckpointFileError, match=f"cannot be read.*{os.strerror(code)}"
            ):
                manager.restore_latest({"x": np.ones(2)})
    assert manager.all_steps() == [1]


FEW_DESCRIPTORS = """
import os, resource, sys, numpy as np, distribute_jax as dj
manager, Failed = dj.CheckpointManager(sys.argv[1]), dj.CheckpointFileError
manager.save(1, {"x": np.zeros(2)}), manager.wait()
before = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in (1, 2, 8):
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, before[1]))
    [os.close(held.pop()) for _ in range(free)]
    try:
        manager.save(2 + free, {"x": np.zeros(2)}), manager.wait()
    except Failed: pass
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    list(map(os.close, held))
    print([name for name in os.listdir(sys.argv[1]) if name.endswith(".saving")])
"""


@pytest.mark.exhaustive
def test_a_save_for_which_descriptors_lack_leaves_no_folder(tmp_path: Path) -> None:
    """Also where the folder was made and its lock could not be opened."""
    assert set(output_of("-c", FEW_DESCRIPTORS, str(tmp_path))[0].splitlines()) == {"[]"}


def test_a_damaged_step_that_cannot_be_renamed_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk: the step before is used, and the warning says so."""
    manager = dj.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"x": step})
    manager.wait()
    (tmp_path / "2" / "manifest.json").unlink()
    monkeypatch.setattr(Path, "rename", full)
    tree = {"x": 0}
    with pytest.warns(RuntimeWarning, match="left where it is, for lack of permission"):
        assert manager.restore_latest(tree) == 1
    (tmp_path / "1" / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(dj.CheckpointDamagedError, match="damaged are 1, 2"):
            manager.restore_latest(tree)
    assert tree == {"x": 1}


LAST_SAVE = """
import sys, numpy as np, distribute_jax as dj
if {fails}:
    from distribute_jax.checkpoint import _write
    def full(*_, **__): raise OSError(28, "No space left on device")
    _write.write_arrays = full
dj.CheckpointManager({directory!r}).save(1, {{"x": np.ones(1000)}})
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_ends_without_waiting_has_saved(fails: bool, tmp_path: Path) -> None:
    """Python waits for the last save; a failure is a warning."""
    directory = str(tmp_path / "c")
    done = subprocess.run(
        [sys.executable, "-c", LAST_SAVE.format(fails=fails, directory=directory)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert dj.CheckpointManager(directory).all_steps() == ([] if fails else [1]), done.stderr
    assert ("No space left on device" in done.stderr) is fails
    assert fails or done.stderr == ""
