"""Writes one value into the current event file: a scalar, an image as PNG, a histogram or a text."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ArgumentError, PerReplicaTypeError, TracedValueError
from distribute_jax._messages import leaf_text
from distribute_jax._values import DistributedValues
from distribute_jax.summary._writer import current, number_tensor, string_tensor, summary_value

Float64 = np.ndarray[Any, np.dtype[np.float64]]


def scalar(name: str, data: Any, step: int | None = None, description: str | None = None) -> bool:
    """Writes a number.

    Args:
        name: its tag.
        data: the number, as a Python number or an array of no dims; reading it waits for its step.
        step: which step of the training it belongs to; None for that of ``as_default``.
        description: a text for TensorBoard.

    Returns:
        Whether it was written: False without a current writer, and in all processes but the first.

    Raises:
        ValueError: an array of any dims; no step.
        TypeError: a per-replica value; a value that a step is still computing.

    Example:
        >>> import distribute_jax as dj
        >>> dj.summary.scalar("loss", 0.5, step=1)  # there is no current writer
        False

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/scalar
    """
    found = current("scalar", step)
    if found is None:
        return False
    array = _read("scalar", name, data)
    if array.ndim:
        raise ArgumentError(
            f"dj.summary.scalar({name!r}) got {leaf_text(array)}. A scalar is one number: take its mean, "
            "or call dj.summary.histogram."
        )
    tensor = number_tensor(array.astype(np.float32))
    return found[0]._write(summary_value(name, "scalars", tensor, description), found[1])


def histogram(
    name: str,
    data: Any,
    step: int | None = None,
    buckets: int = 30,
    description: str | None = None,
) -> bool:
    """Writes how numbers are distributed.

    Args:
        name: its tag.
        data: an array of any shape.
        step: as for ``scalar``.
        buckets: into how many buckets of equal width they are counted.
        description: a text for TensorBoard.

    Returns:
        Whether it was written; see ``scalar``.

    Raises:
        ValueError: numbers that are not finite; fewer than one bucket; no step.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/histogram
    """
    found = current("histogram", step)
    if found is None:
        return False
    if not isinstance(buckets, int) or buckets < 1:
        raise ArgumentError(f"dj.summary.histogram(buckets={buckets!r}): it is at least 1.")
    array = _read("histogram", name, data).astype(np.float64).ravel()
    if not np.isfinite(array).all():
        raise ArgumentError(
            f"dj.summary.histogram({name!r}): {int((~np.isfinite(array)).sum())} of {array.size} numbers "
            "are NaN or infinite, which belong into no bucket. Leave them out, as in data[isfinite(data)]."
        )
    tensor = number_tensor(_counted(array, buckets))
    return found[0]._write(summary_value(name, "histograms", tensor, description), found[1])


def image(
    name: str,
    data: Any,
    step: int | None = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> bool:
    """Writes images.

    Args:
        name: their tag.
        data: of shape (images, height, width, channels), with 1 to 4 channels: grey, grey with alpha,
            RGB or RGB with alpha; uint8, or floats from 0 to 1, beyond which they are clipped.
        step: as for ``scalar``.
        max_outputs: how many of the images are written.
        description: a text for TensorBoard.

    Returns:
        Whether they were written; see ``scalar``.

    Raises:
        ValueError: data of another shape or dtype; no step.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/image
    """
    found = current("image", step)
    if found is None:
        return False
    array = _read("image", name, data)
    floating = np.issubdtype(array.dtype, np.floating)
    if (
        array.ndim != 4
        or array.shape[3] not in (1, 2, 3, 4)
        or not (floating or array.dtype == np.uint8)
    ):
        raise ArgumentError(
            f"dj.summary.image({name!r}) got {leaf_text(array)}. Images are uint8, or floats from 0 to 1, of "
            "shape (images, height, width, channels) with 1 to 4 channels; for one image pass image[None]."
        )
    shown = array[:max_outputs]
    if floating:
        shown = (np.clip(np.nan_to_num(shown.astype(np.float64)), 0, 1) * 255 + 0.5).astype(
            np.uint8
        )
    sizes = [str(array.shape[2]).encode(), str(array.shape[1]).encode()]
    parts = [*sizes, *(png(pixels) for pixels in shown)]
    tensor = string_tensor(parts, [len(parts)])
    return found[0]._write(summary_value(name, "images", tensor, description), found[1])


def text(name: str, data: Any, step: int | None = None, description: str | None = None) -> bool:
    """Writes a text, which TensorBoard reads as Markdown.

    Args:
        name: its tag.
        data: a string, or a nest of lists of strings, which becomes a table.
        step: as for ``scalar``.
        description: another text, about the first.

    Returns:
        Whether it was written; see ``scalar``.

    Raises:
        ValueError: no strings; no step.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/text
    """
    found = current("text", step)
    if found is None:
        return False
    array = np.asarray(data)
    if array.dtype.kind not in "US":
        raise ArgumentError(f"dj.summary.text({name!r}) got {leaf_text(data)}. Pass str(…) of it.")
    parts = [part if isinstance(part, bytes) else part.encode() for part in array.ravel().tolist()]
    tensor = string_tensor(parts, array.shape)
    return found[0]._write(summary_value(name, "text", tensor, description), found[1])


def _counted(array: Float64, buckets: int) -> Float64:
    """Gives a row (left edge, right edge, count) for each bucket."""
    if array.size == 0:
        return np.zeros((buckets, 3))
    low, high = array.min(), array.max()
    if low == high:  # all numbers are one: TensorBoard shows buckets of no width
        counts = np.zeros(buckets)
        counts[-1] = array.size
        edges = np.full(buckets + 1, low)
    else:
        counts, edges = (part.astype(np.float64) for part in np.histogram(array, buckets))
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def _read(called: str, name: str, data: Any) -> np.ndarray[Any, Any]:
    if isinstance(data, jax.core.Tracer):
        raise TracedValueError(
            f"dj.summary.{called}({name!r}) was called inside a step, where numbers are not known yet. "
            "Return the value from the step, and write what strategy.run gives."
        )
    if isinstance(data, DistributedValues):
        raise PerReplicaTypeError(
            f"dj.summary.{called}({name!r}) got a value that each replica has its own of. Use "
            "strategy.reduce('sum', value, axis=None) or strategy.gather(value, axis=0) first."
        )
    array = np.asarray(data)
    if array.dtype.kind not in "biuf" and str(array.dtype) != "bfloat16":
        raise ArgumentError(
            f"dj.summary.{called}({name!r}) got {leaf_text(data)}. Pass real numbers."
        )
    return array


_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""By the number of channels: grey, grey with alpha, RGB, RGB with alpha."""


def png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Gives the PNG file of one image.

    Args:
        pixels: uint8, of shape (height, width, channels); 1 to 4 channels.

    Source: https://www.w3.org/TR/png/
    """
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    rows = pixels.reshape(height, width * channels)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    data = zlib.compress(unfiltered.tobytes())
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
