"""Reads back what ``dj.summary`` writes for TensorBoard."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_reader import read, scalars
from PIL import Image

import distribute_jax as dj

summary = dj.summary


def write_one(folder: Path, function: Any, *args: Any, step: int = 3, **options: Any) -> Any:
    """Writes one value and returns its entry in the file."""
    writer = summary.create_file_writer(folder)
    with writer.as_default(step):
        assert function("tag", *args, **options)
    (entry,) = read(folder)
    assert (entry.tag, entry.step) == ("tag", step)
    return entry


@pytest.mark.parametrize(
    "number", [0.5, 3, True, np.float64(0.5), np.int32(-2), jnp.asarray(0.5, jnp.bfloat16)]
)
def test_numbers_of_any_dtype_are_written_as_float32_scalars(tmp_path: Path, number: Any):
    entry = write_one(tmp_path, summary.scalar, number)
    assert entry.plugin == "scalars"
    assert entry.data.dtype == np.float32
    assert entry.data.shape == ()
    assert entry.data == float(number)


@pytest.mark.parametrize("step", [0, 2**40, -1, np.int64(5), jnp.int32(7)])
def test_large_negative_and_array_steps(tmp_path: Path, step: Any):
    assert write_one(tmp_path, summary.scalar, 1.0, step=step).step == step


def test_histogram_equals_numpys(tmp_path: Path):
    data = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    entry = write_one(tmp_path, summary.histogram, jnp.asarray(data), buckets=7)
    counts, edges = np.histogram(data.astype(np.float64), 7)
    assert entry.plugin == "histograms"
    np.testing.assert_array_equal(entry.data[:, 2], counts)
    np.testing.assert_array_equal(entry.data[:, 0], edges[:-1])
    np.testing.assert_array_equal(entry.data[:, 1], edges[1:])


def test_histogram_of_equal_or_no_numbers(tmp_path: Path):
    """Equal numbers are in the last of buckets of no width, as in TensorFlow."""
    entry = write_one(tmp_path / "equal", summary.histogram, np.full(9, 2.5))
    assert entry.data.shape == (30, 3)
    assert entry.data[:, 2].tolist() == [0] * 29 + [9]
    assert set(entry.data[:, :2].ravel()) == {2.5}
    assert not write_one(tmp_path / "none", summary.histogram, np.zeros(0)).data.any()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_are_lossless_png_files(tmp_path: Path, channels: int):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, channels), np.uint8)
    entry = write_one(tmp_path, summary.image, pixels, max_outputs=2)
    (width, height, *files), shape = entry.data
    assert (entry.plugin, width, height, shape) == ("images", b"4", b"5", [4])
    for image, file in zip(pixels, files, strict=False):
        np.testing.assert_array_equal(decoded(file), image)


def test_float_images_are_clipped_to_0_and_1_and_nan_is_black(tmp_path: Path):
    row = [-1.0, 0.0, 0.5, 1.0, 7.0, np.nan]
    (_, _, file), _ = write_one(tmp_path, summary.image, np.array(row).reshape(1, 1, 6, 1)).data
    assert decoded(file).ravel().tolist() == [0, 0, 128, 255, 255, 0]


def decoded(file: bytes) -> np.ndarray:
    """Returns the pixels of a PNG file, of shape (height, width, channels)."""
    pixels = np.asarray(Image.open(io.BytesIO(file)))
    return pixels.reshape(*pixels.shape[:2], -1)


def test_texts_are_utf8_and_nested_lists_are_tables(tmp_path: Path):
    entry = write_one(tmp_path / "one", summary.text, "grüße **all**")
    assert entry.plugin == "text"
    assert entry.data == (["grüße **all**".encode()], [])
    table = write_one(tmp_path / "table", summary.text, [["a", "b"], ["c", "dd"]])
    assert table.data == ([b"a", b"b", b"c", b"dd"], [2, 2])


def test_without_a_current_writer_nothing_is_written():
    assert not summary.scalar("x", 1.0, step=0)
    summary.flush()


def test_writers_nest_and_are_flushed_at_the_end_of_the_block(tmp_path: Path):
    outer, inner = (summary.create_file_writer(tmp_path / name) for name in ("outer", "inner"))
    with outer.as_default(step=1):
        summary.scalar("a", 1.0)
        with inner.as_default(step=2):
            summary.scalar("b", 2.0)
        summary.scalar("c", 3.0, step=7)
        assert scalars(tmp_path / "inner") == {"b": [(2, 2.0)]}
    assert scalars(tmp_path / "outer") == {"a": [(1, 1.0)], "c": [(7, 3.0)]}
    summary.create_file_writer(tmp_path / "outer").close()
    assert len(list((tmp_path / "outer").iterdir())) == 2


def test_only_the_chief_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distribute_jax.processes._job._current", SimpleNamespace(index=1))
    writer = summary.create_file_writer(tmp_path / "logs")
    with writer.as_default(step=0):
        assert not summary.scalar("x", 1.0)
    writer.close()
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("function", "data", "message"),
    [
        ("scalar", np.zeros(3), r"float64\[3\]. A scalar is one number"),
        ("scalar", "high", "Pass real numbers"),
        ("scalar", 1j, "Pass real numbers"),
        ("histogram", np.array([1.0, np.nan]), "1 of 2 numbers are NaN"),
        ("image", np.zeros((4, 4, 3)), r"pass image\[None\]"),
        ("image", np.zeros((1, 4, 4, 5)), "1 to 4 channels"),
        ("image", np.zeros((1, 4, 4, 1), np.int32), "uint8, or floats"),
        ("text", 3, "Pass str"),
        ("text", [["a"], ["b", "c"]], "strings in equally long lists; got"),
        ("histogram", [[1], [2, 3]], "a number, or an array of them; got"),
    ],
)
def test_invalid_data_is_refused(tmp_path: Path, function: str, data: Any, message: str):
    with (
        summary.create_file_writer(tmp_path).as_default(step=0),
        pytest.raises(ValueError, match=message),
    ):
        getattr(summary, function)("tag", data)


def test_a_step_must_be_an_int_and_the_writer_open(tmp_path: Path):
    writer = summary.create_file_writer(tmp_path)
    with writer.as_default():
        for step in (None, 0.5, "a"):
            with pytest.raises(ValueError, match=r"step must be (None or )?an int"):
                summary.scalar("x", 1.0, step)
    writer.close()
    with writer.as_default(step=1), pytest.raises(RuntimeError, match="is closed"):
        summary.scalar("x", 1.0)


def test_tracers_and_per_replica_values_are_refused(tmp_path: Path, s2: Any):
    losses = s2.run(lambda x: x.sum(), args=(next(iter(s2.distribute_dataset([np.arange(4.0)]))),))
    with summary.create_file_writer(tmp_path).as_default(step=0):
        with pytest.raises(TypeError, match=r"strategy\.reduce"):
            summary.scalar("x", losses)
        with pytest.raises(TypeError, match="Return the value from the step"):
            jax.jit(lambda x: summary.scalar("x", x))(1.0)
        assert summary.scalar("x", s2.reduce("sum", losses, axis=None))
    assert scalars(tmp_path) == {"x": [(0, 6.0)]}
