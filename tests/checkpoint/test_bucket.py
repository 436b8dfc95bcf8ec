"""Checkpoints in an object store, where nothing is renamed: here one in the memory of this process."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.checkpoint import _write, load, save
from distribute_jax.checkpoint._storage import BucketDirectory, bucket_directory


@pytest.fixture
def url() -> Any:
    """A URL that no other test uses."""
    found = f"memory://{uuid.uuid4().hex}/run"
    yield found
    fsspec.filesystem("memory").rm(
        found.removeprefix("memory:/").rpartition("/")[0], recursive=True
    )


def objects(url: str) -> list[str]:
    """Returns the names of all objects."""
    return bucket_directory("test", url).files()


def test_steps_are_kept_restored_and_pruned(url: str) -> None:
    """As on a disk: intervals, the newest steps, every bit; the directory is the URL."""
    tree = {"x": np.arange(6.0).reshape(2, 3), "none": np.zeros((0, 2)), "step": 0}
    with dj.CheckpointManager(url, max_to_keep=2) as manager:
        assert manager.restore_latest(dict(tree)) is None
        for step in (1, 2, 3):
            tree["x"] += step
            tree["step"] = step
            assert manager.save(step, tree)
    assert manager.directory == url
    assert manager.all_steps() == [2, 3]
    assert {name.partition("/")[0] for name in objects(url)} == {"2", "3"}
    other = {"x": np.zeros((2, 3)), "none": np.ones((0, 2)), "step": 9}
    assert dj.CheckpointManager(url).restore_latest(other) == 3
    np.testing.assert_array_equal(other["x"], tree["x"])
    assert other["step"] == 3
    with pytest.raises(dj.CheckpointError, match=r"There is no step 7 in memory://.*\[2, 3\]"):
        manager.restore(7, other)


def test_a_step_without_a_manifest_does_not_exist(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written last and removed first, so the step before is used."""
    manager = dj.CheckpointManager(url)
    manager.save(1, {"x": np.ones(2)})
    manager.wait()
    names = []

    def killed(bucket: BucketDirectory, name: str, data: bytes) -> None:
        names.append(name)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(BucketDirectory, "write", killed)
        # Who is killed removes nothing.
        broken.setattr(BucketDirectory, "_remove_all", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            save(f"{url}/2", {"x": np.zeros(2)})
    assert names == ["2/manifest.json"]
    assert any(name.startswith("2/arrays-") for name in objects(url)), "they were put before"
    assert manager.all_steps() == [1]
    assert manager.latest_step() == 1
    manager.save(2, {"x": np.zeros(2)})
    manager.wait()
    arrays = {name.split("/")[1] for name in objects(url) if name.startswith("2/arrays-")}
    assert len(arrays) == 1, "what was left over goes when the step is saved"

    with monkeypatch.context() as broken:
        broken.setattr(BucketDirectory, "_remove_all", killed)
        with pytest.raises(TypeError):
            manager._directory.remove("2")
    assert manager.all_steps() == [1]


def test_a_damaged_step_is_detected_and_set_aside(url: str) -> None:
    """A changed object, and a missing one: the step before is used, and the damaged one is kept."""
    manager = dj.CheckpointManager(url)
    for step in (1, 2, 3):
        manager.save(step, {"x": np.full(50, step)})
    manager.wait()
    bucket = bucket_directory("test", url)
    for step, change in ((3, True), (2, False)):
        name = next(name for name in objects(url) if name.startswith(f"{step}/arrays-"))
        bucket.write(name, bucket.read(name) + b"x") if change else bucket.remove_file(name)
    tree = {"x": np.zeros(50, int)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.restore_latest(tree) == 1
    first, second = (str(one.message) for one in caught)
    assert "step 3 is damaged and was set aside as 3/damaged.json" in first
    assert "other bytes than were written" in first
    assert "missing" in second
    assert manager.all_steps() == [1]
    bucket.remove_file("1/manifest.json")
    with pytest.raises(dj.CheckpointDamagedError, match=r"2/damaged.json, 3/damaged.json"):
        manager.restore_latest(tree)


def test_one_checkpoint_is_saved_replaced_and_loaded(url: str) -> None:
    """``save`` and ``load`` accept a URL; the arrays of the old checkpoint are removed."""
    save(f"{url}/model", {"x": np.zeros(2)})
    with pytest.raises(dj.CheckpointError, match="Save to another URL"):
        save(f"{url}/model", {"x": np.ones(2)}, overwrite=False)
    save(f"{url}/model/", {"x": np.ones(2)})
    assert load(f"{url}/model", {"x": np.zeros(2)})["x"].tolist() == [1, 1]
    assert len({n.split("/")[1] for n in objects(url) if "arrays-" in n}) == 1
    with pytest.raises(ValueError, match="Give a folder in that store: 'memory://run/model'"):
        save("memory://run", {"x": np.ones(2)})
    with pytest.raises(dj.CheckpointError, match="There is no checkpoint at memory://"):
        load(f"{url}/other", {})


class RefusedError(Exception):
    """An error of a store's client that is not an OSError."""


def test_an_error_of_the_store_names_the_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the step is left behind."""
    manager = dj.CheckpointManager(url)
    manager.save(1, {"x": np.zeros(2)})
    manager.wait()
    before = objects(url)

    def refuse(*_: Any, **__: Any) -> None:
        raise RefusedError("403 Forbidden")

    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
        manager.save(2, {"x": np.zeros(2)})
        with pytest.raises(
            dj.CheckpointFileError, match=rf"{url}/2 could not be written: .*403 Forbidden"
        ):
            manager.wait()
    assert objects(url) == before
    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "cat_file", refuse)
        with pytest.raises(dj.CheckpointFileError, match="1 cannot be read: RefusedError: 403"):
            manager.restore(1, {"x": np.zeros(2)})


def test_a_missing_client_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So are an unknown URL scheme, and a URL that went through a Path."""

    def missing(url: str, **_: Any) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        dj.MissingPackageError, match=r"gs:// is not installed\. Please install gcsfs"
    ):
        dj.CheckpointManager("gs://bucket/run")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="nowhere://bucket"):
        dj.CheckpointManager("nowhere://bucket")
    with pytest.raises(ValueError, match=r"Pass the text: 'gs://bucket/run'"):
        dj.CheckpointManager(Path("gs://bucket/run"))


def test_files_that_lead_out_of_the_checkpoint_are_not_fetched(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a manifest does not protect against whoever wrote it."""
    real = _write._write_pieces

    def wrong(*args: Any) -> Any:
        return real(*args) | {"files": {"whole-0/../../../out": "0" * 64}}

    monkeypatch.setattr(_write, "_write_pieces", wrong)
    save(f"{url}/model", {"x": np.zeros(2)})
    with pytest.raises(
        dj.CheckpointDamagedError, match=r"no checkpoint has the name '../../../out'"
    ):
        load(f"{url}/model", {"x": np.zeros(2)})
