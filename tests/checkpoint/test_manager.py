"""When the manager saves, what it keeps, and how two of them share a directory."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.checkpoint import _agreement, _read, _steps, _storage, _write, load, save
from distribute_jax.processes import activity


def saved(manager: dj.CheckpointManager, steps: Any, **kinds: Any) -> list[int]:
    """Calls ``save`` at each step, and returns the steps that it saved."""
    found = [step for step in steps if manager.save(step, {"step": step}, **kinds)]
    manager.wait()
    return found


POLICIES: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "each call": ({}, [0, 1, 2], [0, 1, 2]),
    "every 3": ({"every_steps": 3}, list(range(10)), [3, 6, 9]),
    "every 3, passed by 2": ({"every_steps": 3}, [2, 4, 6, 8, 10], [4, 6, 10]),
    "every 3, from 7": ({"every_steps": 3}, [7, 8, 9], [7, 9]),
    "never by time": ({"every_minutes": 9.0}, [1, 2, 3], []),
    "at once by time": ({"every_minutes": 1e-9}, [1, 2], [1, 2]),
}


@pytest.mark.parametrize("case", POLICIES)
def test_save_saves_when_it_is_time(case: str, tmp_path: Path) -> None:
    """Otherwise it returns False, and writes nothing."""
    policy, steps, wanted = POLICIES[case]
    manager = dj.CheckpointManager(tmp_path, max_to_keep=None, **policy)
    assert saved(manager, steps) == wanted == manager.all_steps()
    assert manager.latest_step() == max(wanted, default=None)


def test_minutes_count_from_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a save that was due by steps."""
    now = [100.0]
    monkeypatch.setattr(_steps.time, "monotonic", lambda: now[0])
    manager = dj.CheckpointManager(tmp_path, every_minutes=2, every_steps=10)
    found = []
    for step in range(1, 16):
        now[0] += 30
        found += saved(manager, [step])
    assert found == [4, 8, 10, 14]


def test_intervals_go_on_after_a_restore(tmp_path: Path) -> None:
    """A run that continues at step 7 saves at 9, not at once."""
    saved(dj.CheckpointManager(tmp_path), [7])
    manager = dj.CheckpointManager(tmp_path, every_steps=3)
    tree = {"step": 0}
    assert manager.restore_latest(tree) == 7 == tree["step"]
    assert saved(manager, [8, 9, 10]) == [9]


def test_the_oldest_steps_are_removed(tmp_path: Path) -> None:
    """``max_to_keep`` remain; a forced save of an older step is kept."""
    manager = dj.CheckpointManager(tmp_path, max_to_keep=2)
    saved(manager, range(5))
    assert manager.all_steps() == [3, 4]
    saved(manager, [1], force=True)
    assert manager.all_steps() == [1, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "4"]


def test_an_existing_step_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    """A run that forgot to restore would otherwise overwrite, or prune, the previous run."""
    manager = dj.CheckpointManager(tmp_path)
    saved(manager, [5])
    for step in (5, 4):
        with pytest.raises(dj.CheckpointError, match=r"step 5 already.*restore_latest\(tree\)"):
            manager.save(step, {"step": -1})
    assert manager.save(np.int64(5), {"step": -1}, force=True)
    tree = {"step": 0}
    manager.restore(5, tree)
    assert tree == {"step": -1}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"max_to_keep": 0}, "max_to_keep must be .* got 0"),
    "no interval": ({"every_steps": 0}, "every_steps must be .* got 0"),
    "no time": ({"every_minutes": -1}, "every_minutes must be .* got -1"),
    "no policy": ({"on_error": "ignore"}, "on_error must be .* got 'ignore'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused(case: str, tmp_path: Path) -> None:
    """By name and value."""
    arguments, message = WRONG[case]
    with pytest.raises(dj.ArgumentError, match=message):
        dj.CheckpointManager(tmp_path, **arguments)


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_a_step_is_a_number_from_0(step: Any, tmp_path: Path) -> None:
    """Other values are refused before anything is copied."""
    with pytest.raises(dj.ArgumentError, match="step must be an integer >= 0"):
        dj.CheckpointManager(tmp_path).save(step, {"x": 1})


def test_save_returns_before_the_file_is_written_and_one_save_runs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first write finishes only after ``save`` returned; the second save waits for it, and logs that."""
    monkeypatch.setattr(_agreement, "_WARN_AFTER_SECONDS", 0.05)
    go, running, most = threading.Event(), [], []
    write = _write.write_arrays

    def slow(folder: Path, named: Any) -> None:
        running.append(folder)
        assert go.wait(60)
        most.append(len(running))
        write(folder, named)
        running.remove(folder)

    monkeypatch.setattr(_write, "write_arrays", slow)
    with dj.CheckpointManager(tmp_path) as manager:
        tree = {"x": np.zeros(3)}
        manager.save(1, tree)
        assert not (tmp_path / "1").exists()
        tree["x"][:] = 5
        released = []
        threading.Timer(0.2, lambda: (released.append(1), go.set())).start()
        manager.save(2, tree)
        assert released, "the second save waited for the first"
        assert "Waiting for a checkpoint that is still being written" in caplog.text
    assert most == [1, 1]
    manager.restore(1, tree)
    assert tree["x"].tolist() == [0, 0, 0], "the copy was taken before save returned"


def test_after_an_error_the_watchdog_knows_that_a_save_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a process that was killed and never writes its part, before JAX aborts this one."""
    monkeypatch.setattr(activity(), "watched", True)
    go, phases, write = threading.Event(), [], _write.write_arrays

    def slow(folder: Path, named: Any) -> None:
        assert go.wait(60)
        time.sleep(0.3)
        phases.append(activity().waiting()[0])  # type: ignore[index]
        write(folder, named)

    monkeypatch.setattr(_write, "write_arrays", slow)
    with suppress(KeyError), dj.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": np.zeros(3)})
        go.set()
        raise KeyError
    assert (phases, manager.all_steps()) == (["saving"], [1])


def test_saves_from_several_threads_are_written_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads save at once while the first write is slow: eight steps, never two writes at a time."""
    running, most, write = [], [], _write.write_arrays

    def slow(folder: Path, named: Any) -> None:
        running.append(folder)
        most.append(len(running))
        time.sleep(0.05)
        write(folder, named)
        running.remove(folder)

    monkeypatch.setattr(_write, "write_arrays", slow)
    with dj.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        with ThreadPoolExecutor(8) as pool:
            saves = [
                pool.submit(manager.save, n, {"x": np.full(3, n)}, force=True) for n in range(8)
            ]
        assert [save.result() for save in saves] == [True] * 8
    assert most == [1] * 8
    assert manager.all_steps() == list(range(8))


def test_two_managers_on_one_directory_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one writes, the other saves too, and keeps the first one's unfinished folder."""
    go, writes = threading.Event(), _write.write_arrays

    def slow(folder: Path, named: Any) -> None:
        if named["0"][0] == 1:
            assert go.wait(60)
        writes(folder, named)

    monkeypatch.setattr(_write, "write_arrays", slow)
    with dj.CheckpointManager(tmp_path) as first, dj.CheckpointManager(tmp_path) as second:
        first.save(1, {"x": np.ones(2)})
        while not list(tmp_path.glob(".1.*")):
            time.sleep(0.01)
        second.save(2, {"x": np.zeros(2)})
        second.wait()
        assert len(list(tmp_path.glob(".1.*"))) == 1
        go.set()
    assert first.all_steps() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    for step in (1, 2):
        first.restore(step, {"x": np.zeros(2)})


@pytest.mark.parametrize("where", ["_read_folder", "read_arrays"])
def test_a_step_that_is_replaced_while_it_is_read_is_not_damaged(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one program trains with ``max_to_keep=1``, and another evaluates: it gets the new one."""
    trainer, tree = dj.CheckpointManager(tmp_path, max_to_keep=1), {"x": np.zeros(2)}
    read, steps = getattr(_read, where), iter([1, 2])

    def save_next(*_: Any) -> None:
        for step in itertools.islice(steps, 1):
            trainer.save(step, {"x": np.full(2, float(step))})
            trainer.wait()

    save_next()
    monkeypatch.setattr(_read, where, lambda *arguments: (save_next(), read(*arguments))[1])
    assert dj.CheckpointManager(tmp_path).restore_latest(tree) == 2
    assert tree["x"].tolist() == [2, 2]


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """And nothing else in the directory, hidden or not."""
    for name in (".3.0123abcd.saving", ".4.00000000.saving/arrays-1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".3.0123abcd.saving" / "lock").touch()
    kept = [".git", ".3.saving", "3.0123abcd.saving", ".x.0123abcd.saving"]
    for name in kept:
        (tmp_path / name).mkdir()
    saved(dj.CheckpointManager(tmp_path), [5])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "5"])


def test_save_replaces_only_a_checkpoint(tmp_path: Path) -> None:
    """Not with overwrite=False, and never a folder that holds something else, or a file."""
    for i in range(3):
        save(tmp_path / "c", {"x": np.full(2, i)})
    assert len(list((tmp_path / "c").iterdir())) == 3, "arrays, manifest and lock of the last one"
    with pytest.raises(dj.CheckpointError, match="overwrite=True"):
        save(tmp_path / "c", {"x": np.zeros(2)}, overwrite=False)
    tree = {"x": np.zeros(2, int)}
    assert load(tmp_path / "c", tree)["x"].tolist() == [2, 2]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    for name, message in (("mine", "with other files in it"), ("file", "is a file")):
        with pytest.raises(dj.CheckpointFileError, match=message):
            save(tmp_path / name, tree)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", tree, overwrite=False)
    assert not list(tmp_path.glob(".*"))


def test_a_save_killed_between_its_renames_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new arrays are there, the old manifest still counts, and the next save cleans up."""
    save(tmp_path / "c", {"x": np.zeros(2)})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(_storage.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "c", {"x": np.ones(2)})
    assert len(list((tmp_path / "c").glob("arrays-*"))) == 2
    tree = {"x": np.full(2, 9.0)}
    assert load(tmp_path / "c", tree)["x"].tolist() == [0, 0]
    save(tmp_path / "c", {"x": np.ones(2)})
    assert len(list((tmp_path / "c").glob("arrays-*"))) == 1
    assert load(tmp_path / "c", tree)["x"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run\\1", "run\udce4"])
def test_a_path_that_orbax_would_not_read_is_refused(name: str, tmp_path: Path) -> None:
    """Orbax would save there, and not find it again."""
    with pytest.raises(dj.ArgumentError, match="would not find again"):
        dj.CheckpointManager(tmp_path / name)
    with pytest.raises(dj.ArgumentError, match="would not find again"):
        save(tmp_path / name, {"x": 1})


def test_a_path_is_refused_where_its_bytes_are_not_those_of_orbax(
    tmp_path: Path, monkeypatch
) -> None:
    """Orbax names files in UTF-8, also under a locale of another encoding."""
    with dj.CheckpointManager(tmp_path / "größe") as manager:
        manager.save(1, {"x": np.ones(2)})
    assert dj.CheckpointManager(tmp_path / "größe").restore_latest({"x": np.zeros(2)}) == 1
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    with pytest.raises(dj.ArgumentError, match="the encoding of names is iso8859-1"):
        dj.CheckpointManager(tmp_path / "größe")


def test_a_tilde_is_the_home_folder_and_an_empty_path_is_refused(tmp_path, monkeypatch) -> None:
    """Otherwise steps would be kept, and old ones removed, in a folder "~" or where the program started."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dj.CheckpointManager("~/run").directory == tmp_path / "run"
    for make in (dj.CheckpointManager, dj.callbacks.BackupAndRestore):
        with pytest.raises(dj.ArgumentTypeError, match="must be a path; got ''"):
            make("")


def test_save_with_check_refuses_copies_that_differ(tmp_path: Path) -> None:
    """Nothing is written then; without a difference it saves as without the check."""
    strategy = dj.MirroredStrategy([0, 1, 2])
    with strategy.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    manager = dj.CheckpointManager(tmp_path)
    assert manager.save(1, {"model": model, "count": 3}, check=True)
    raw = model.kernel.get_raw_value()
    parts = [np.asarray(s.data) + (i == 1) for i, s in enumerate(raw.addressable_shards)]
    parts = [
        jax.device_put(x, s.device) for x, s in zip(parts, raw.addressable_shards, strict=True)
    ]
    odd = jax.make_array_from_single_device_arrays(raw.shape, raw.sharding, parts)
    model.kernel.set_raw_value(odd)
    with pytest.raises(dj.OutOfSyncError, match=r"kernel.*: cpu:1 unequal to cpu:0, cpu:2"):
        manager.save(2, {"model": model, "count": 3}, check=True)
    assert manager.all_steps() == [1]
