"""What loops write for TensorBoard, read back."""

from __future__ import annotations

import io
import sys
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


def written(folder: Path, function: Any, *args: Any, step: int = 3, **options: Any) -> Any:
    """Writes one value and returns the entry that is in the file."""
    writer = summary.create_file_writer(folder)
    with writer.as_default(step):
        assert function("tag", *args, **options)
    (entry,) = read(folder)
    assert (entry.tag, entry.step) == ("tag", step)
    return entry


@pytest.mark.parametrize(
    "number", [0.5, 3, True, np.float64(0.5), np.int32(-2), jnp.asarray(0.5, jnp.bfloat16)]
)
def test_a_number_is_written_as_a_scalar(tmp_path: Path, number: Any):
    """Of any dtype, and read back as float32."""
    entry = written(tmp_path, summary.scalar, number)
    assert entry.plugin == "scalars"
    assert entry.data.dtype == np.float32
    assert entry.data.shape == ()
    assert entry.data == float(number)


@pytest.mark.parametrize("step", [0, 2**40, -1, np.int64(5), jnp.int32(7)])
def test_steps_are_read_back(tmp_path: Path, step: Any):
    """Large and negative ones, and integers of NumPy and JAX."""
    assert written(tmp_path, summary.scalar, 1.0, step=step).step == step


def test_a_histogram_counts_every_number_once(tmp_path: Path):
    """The edges run from the least to the greatest; each bucket holds what NumPy counts."""
    data = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    entry = written(tmp_path, summary.histogram, jnp.asarray(data), buckets=7)
    counts, edges = np.histogram(data.astype(np.float64), 7)
    assert entry.plugin == "histograms"
    np.testing.assert_array_equal(entry.data[:, 2], counts)
    np.testing.assert_array_equal(entry.data[:, 0], edges[:-1])
    np.testing.assert_array_equal(entry.data[:, 1], edges[1:])


def test_a_histogram_of_equal_numbers_or_of_none(tmp_path: Path):
    """Buckets of no width, all numbers in the last; all zeros where there is no number."""
    entry = written(tmp_path / "equal", summary.histogram, np.full(9, 2.5))
    assert entry.data.shape == (30, 3)
    assert entry.data[:, 2].tolist() == [0] * 29 + [9]
    assert set(entry.data[:, :2].ravel()) == {2.5}
    assert not written(tmp_path / "none", summary.histogram, np.zeros(0)).data.any()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_are_png_files_of_the_same_pixels(tmp_path: Path, channels: int):
    """Of the first two of three images every pixel is read back."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, channels), np.uint8)
    entry = written(tmp_path, summary.image, pixels, max_outputs=2)
    (width, height, *files), shape = entry.data
    assert (entry.plugin, width, height, shape) == ("images", b"4", b"5", [4])
    for image, file in zip(pixels, files, strict=False):
        np.testing.assert_array_equal(decoded(file), image)


def test_float_images_go_from_0_to_1(tmp_path: Path):
    """Beyond that they are clipped, and NaN is black."""
    row = [-1.0, 0.0, 0.5, 1.0, 7.0, np.nan]
    (_, _, file), _ = written(tmp_path, summary.image, np.array(row).reshape(1, 1, 6, 1)).data
    assert decoded(file).ravel().tolist() == [0, 0, 128, 255, 255, 0]


def decoded(file: bytes) -> np.ndarray:
    """Returns the pixels of a PNG file, of shape (height, width, channels)."""
    pixels = np.asarray(Image.open(io.BytesIO(file)))
    return pixels.reshape(*pixels.shape[:2], -1)


def test_texts_keep_their_letters_and_their_shape(tmp_path: Path):
    """A nest of lists is a table."""
    entry = written(tmp_path / "one", summary.text, "grüße **all**")
    assert entry.plugin == "text"
    assert entry.data == (["grüße **all**".encode()], [])
    table = written(tmp_path / "table", summary.text, [["a", "b"], ["c", "dd"]])
    assert table.data == ([b"a", b"b", b"c", b"dd"], [2, 2])


def test_without_a_current_writer_nothing_happens():
    """As in TensorFlow: library code may write summaries that nobody asked for."""
    assert not summary.scalar("x", 1.0, step=0)
    summary.flush()


def test_writers_nest_and_are_flushed_at_the_end_of_the_block(tmp_path: Path):
    """The inner one is current in its block only; each has its file, also in one folder."""
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


def test_without_tensorboardx_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    """What to install stands in the message."""
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(dj.MissingPackageError, match=r"distribute-jax\[tensorboard\]"):
        summary.create_file_writer("logs")


def test_only_the_first_process_makes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The others call the same functions to no effect."""
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
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, function: str, data: Any, message: str):
    """The message says what was given and what is taken."""
    with (
        summary.create_file_writer(tmp_path).as_default(step=0),
        pytest.raises(ValueError, match=message),
    ):
        getattr(summary, function)("tag", data)


def test_a_step_must_be_an_int_and_the_writer_open(tmp_path: Path):
    """Otherwise nothing is written."""
    writer = summary.create_file_writer(tmp_path)
    with writer.as_default():
        for step in (None, 0.5, "a"):
            with pytest.raises(ValueError, match=r"step must be (None or )?an int"):
                summary.scalar("x", 1.0, step)
    writer.close()
    with writer.as_default(step=1), pytest.raises(RuntimeError, match="is closed"):
        summary.scalar("x", 1.0)


def test_values_that_are_not_known_or_not_one_are_refused(tmp_path: Path, s2: Any):
    """Inside a step nothing is known yet; a per-replica value is several numbers."""
    losses = s2.run(lambda x: x.sum(), args=(next(iter(s2.distribute_dataset([np.arange(4.0)]))),))
    with summary.create_file_writer(tmp_path).as_default(step=0):
        with pytest.raises(TypeError, match=r"strategy\.reduce"):
            summary.scalar("x", losses)
        with pytest.raises(TypeError, match="Return the value from the step"):
            jax.jit(lambda x: summary.scalar("x", x))(1.0)
        assert summary.scalar("x", s2.reduce("sum", losses, axis=None))
    assert scalars(tmp_path) == {"x": [(0, 6.0)]}
