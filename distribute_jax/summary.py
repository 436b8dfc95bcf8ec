"""Writes event files for TensorBoard: ``tf.summary``'s API, with one file per job.

Source: https://github.com/tensorflow/tensorboard/tree/master/tensorboard/plugins
"""

from __future__ import annotations

import io
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import jax
import numpy as np

from distribute_jax._checks import check_int, converting, importing
from distribute_jax._errors import (
    ArgumentError,
    ContextError,
    PerReplicaTypeError,
    TracedValueError,
)
from distribute_jax._lazy import publish
from distribute_jax._messages import leaf_text
from distribute_jax._values import DistributedValues
from distribute_jax.processes import is_chief

__all__ = ["SummaryWriter", "create_file_writer", "flush", "histogram", "image", "scalar", "text"]

Array = np.ndarray[Any, Any]

_FILE_NUMBERS = count()
_current: ContextVar[tuple[SummaryWriter, int | None] | None] = ContextVar("writer", default=None)


class SummaryWriter:
    """Writes summaries into one event file, which TensorBoard reads.

    In a job of several processes only the chief writes; calls do nothing in the others.
    ``create_file_writer`` returns one.

    Args:
        logdir: the folder of the file, created if it is missing.
        filename_suffix: the end of the file's name.

    Raises:
        MissingPackageError: tensorboardX is not installed.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/SummaryWriter
    """

    def __init__(self, logdir: str | os.PathLike[str], filename_suffix: str = ".v2") -> None:
        self._closed = False
        self._events = _open(os.fspath(logdir), filename_suffix) if is_chief() else None
        # As in TensorFlow, a writer need not be closed.
        self._close_file = self._events and weakref.finalize(self, self._events.close)

    @contextmanager
    def as_default(self, step: int | None = None) -> Iterator[SummaryWriter]:
        """Makes this the current writer of ``dj.summary.scalar`` etc. in the block, then flushes it.

        Args:
            step: the step of calls that do not pass one.
        """
        token = _current.set((self, step))
        try:
            yield self
        finally:
            _current.reset(token)
            self.flush()

    def set_as_default(self, step: int | None = None) -> None:
        """Makes this the current writer; see ``as_default``."""
        _current.set((self, step))

    def flush(self) -> None:
        """Writes buffered events to disk."""
        if self._events is not None and not self._closed:
            self._events.flush()

    def close(self) -> None:
        """Closes the file; using this writer afterwards is an error."""
        if self._close_file is not None:
            self._close_file()  # does nothing the second time
        self._closed = True

    def _write(
        self, step: int, tag: str, plugin: str, array: Array, description: str | None
    ) -> bool:
        if self._closed:
            raise ContextError(
                "This summary writer is closed. Make another: dj.summary.create_file_writer(logdir)."
            )
        if self._events is None:
            return False
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboardX.proto.tensor_pb2 import TensorProto
        from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in array.shape])
        if array.dtype == object:
            tensor = TensorProto(dtype="DT_STRING", string_val=array.ravel().tolist())
        else:
            dtype = "DT_FLOAT" if array.dtype == np.float32 else "DT_DOUBLE"
            tensor = TensorProto(dtype=dtype, tensor_content=array.tobytes())
        tensor.tensor_shape.CopyFrom(shape)
        metadata = SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name=plugin),
            summary_description=description,
        )
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
        self._events.write_event(event)
        return True


def _open(logdir: str, suffix: str) -> Any:
    # Not tensorboardX's FileWriter, which hands events to another thread, whose queue flush does not empty.
    # Nor its ``summary`` functions: they lack descriptions, tables of texts, and images of 1 or 2 channels.
    with importing("Writing files for TensorBoard needs tensorboardX", "tensorboard"):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.record_writer import directory_check
    directory_check(logdir)
    # The number distinguishes writers that are made in the same second.
    return EventsWriter(f"{logdir}/events", f".{os.getpid()}.{next(_FILE_NUMBERS)}{suffix}")


def create_file_writer(
    logdir: str | os.PathLike[str], *, filename_suffix: str = ".v2"
) -> SummaryWriter:
    """Returns a writer of a new event file in a folder.

    Args:
        logdir: the folder, created if it is missing.
        filename_suffix: the end of the file's name.

    Example:
        >>> import distribute_jax as dj, tempfile
        >>> writer = dj.summary.create_file_writer(tempfile.mkdtemp())
        >>> with writer.as_default():
        ...     dj.summary.scalar("loss", 0.5, step=1)
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/create_file_writer
    """
    return SummaryWriter(logdir, filename_suffix)


def flush(writer: SummaryWriter | None = None) -> None:
    """Flushes a writer, or the current one."""
    if writer is None and (current := _current.get()):
        writer = current[0]
    if writer is not None:
        writer.flush()


def scalar(name: str, data: Any, step: int | None = None, description: str | None = None) -> bool:
    """Writes a number.

    Args:
        name: its tag.
        data: a Python number or a scalar array; reading an array waits for the step that computes it.
        step: the training step; that of ``as_default`` if None.
        description: shown by TensorBoard.

    Returns:
        True if it was written; False without a current writer, and in all processes but the chief.

    Raises:
        ValueError: ``data`` is not a scalar, or ``step`` is missing.
        TypeError: a per-replica value, or a value inside a step.

    Example:
        >>> import distribute_jax as dj
        >>> dj.summary.scalar("loss", 0.5, step=1)  # without a current writer
        False

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/scalar
    """
    if (write := _tensor_writer("scalar", "scalars", name, step, description)) is None:
        return False
    array = _numbers("scalar", name, data)
    if array.ndim:
        raise ArgumentError(
            f"dj.summary.scalar({name!r}) got {leaf_text(array)}. A scalar is one number: take its mean, "
            "or call dj.summary.histogram."
        )
    return write(array.astype(np.float32))


def histogram(
    name: str, data: Any, step: int | None = None, buckets: int = 30, description: str | None = None
) -> bool:
    """Writes a histogram of numbers.

    Args:
        name: its tag.
        data: an array of any shape.
        step: as for ``scalar``.
        buckets: the number of buckets, which have equal width.
        description: shown by TensorBoard.

    Returns:
        True if it was written; see ``scalar``.

    Raises:
        ValueError: a number is not finite, ``buckets`` is below 1, or ``step`` is missing.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/histogram
    """
    if (write := _tensor_writer("histogram", "histograms", name, step, description)) is None:
        return False
    check_int("dj.summary.histogram: buckets", buckets)
    array = _numbers("histogram", name, data).astype(np.float64).ravel()
    if not np.isfinite(array).all():
        raise ArgumentError(
            f"dj.summary.histogram({name!r}): {int((~np.isfinite(array)).sum())} of {array.size} numbers "
            "are NaN or infinite and have no bucket. Leave them out, as in data[isfinite(data)]."
        )
    return write(_bucket_counts(array, buckets))


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
            RGB or RGB with alpha; uint8, or floats, which are clipped to 0 … 1.
        step: as for ``scalar``.
        max_outputs: the maximum number of images to write.
        description: shown by TensorBoard.

    Returns:
        True if they were written; see ``scalar``.

    Raises:
        ValueError: ``data`` has another shape or dtype, or ``step`` is missing.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/image
    """
    if (write := _tensor_writer("image", "images", name, step, description)) is None:
        return False
    array = _numbers("image", name, data)
    is_float = np.issubdtype(array.dtype, np.floating)
    if array.ndim != 4 or not 1 <= array.shape[3] <= 4 or not (is_float or array.dtype == np.uint8):
        raise ArgumentError(
            f"dj.summary.image({name!r}) got {leaf_text(array)}. Images are uint8, or floats from 0 to 1, of "
            "shape (images, height, width, channels) with 1 to 4 channels; for one image pass image[None]."
        )
    images = array[:max_outputs]
    if is_float:
        images = np.clip(np.nan_to_num(images.astype(np.float64)), 0, 1) * 255 + 0.5
    _, height, width, _ = array.shape
    files = [_png(pixels) for pixels in images.astype(np.uint8)]
    return write(np.array([str(width).encode(), str(height).encode(), *files], object))


def text(name: str, data: Any, step: int | None = None, description: str | None = None) -> bool:
    """Writes a text, which TensorBoard shows as Markdown.

    Args:
        name: its tag.
        data: a string, or nested lists of strings, which become a table.
        step: as for ``scalar``.
        description: shown by TensorBoard.

    Returns:
        True if it was written; see ``scalar``.

    Raises:
        ValueError: ``data`` is not made of strings, or ``step`` is missing.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/text
    """
    if (write := _tensor_writer("text", "text", name, step, description)) is None:
        return False
    with converting(f"dj.summary.text({name!r})", data, "strings in equally long lists"):
        array = np.asarray(data)
    if array.dtype.kind not in "US":
        raise ArgumentError(f"dj.summary.text({name!r}) got {leaf_text(data)}. Pass str(…) of it.")
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    return write(array.astype(object))


def _tensor_writer(
    function: str, plugin: str, name: str, step: object, description: str | None
) -> Callable[[Array], bool] | None:
    """Returns a function that writes an array with the current writer; None without one."""
    current = _current.get()
    if current is None:
        return None
    writer, default = current
    step = default if step is None else step
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(
            f"dj.summary.{function}: step must be an int; got {step!r}. Pass it here, or to "
            "writer.as_default(step=…)."
        ) from None
    return lambda array: writer._write(number, name, plugin, array, description)


def _numbers(function: str, name: str, data: Any) -> Array:
    if isinstance(data, jax.core.Tracer):
        raise TracedValueError(
            f"dj.summary.{function}({name!r}) was called inside a step, where values are not known yet. "
            "Return the value from the step, and write the result of strategy.run."
        )
    if isinstance(data, DistributedValues):
        raise PerReplicaTypeError(
            f"dj.summary.{function}({name!r}) got a value that differs between replicas. Use "
            "strategy.reduce('sum', value, axis=None) or strategy.gather(value, axis=0) first."
        )
    with converting(f"dj.summary.{function}({name!r})", data, "a number, or an array of them"):
        array = np.asarray(data)
    if array.dtype.kind not in "biuf" and str(array.dtype) != "bfloat16":
        raise ArgumentError(
            f"dj.summary.{function}({name!r}) got {leaf_text(data)}. Pass real numbers."
        )
    return array


def _bucket_counts(array: Array, buckets: int) -> Array:
    """Returns a row (left edge, right edge, count) for each bucket."""
    if array.size == 0:
        return np.zeros((buckets, 3))
    low, high = array.min(), array.max()
    if low == high:  # NumPy would widen the range; TensorFlow writes buckets of no width
        edges: Array = np.full(buckets + 1, low)
        counts: Array = np.zeros(buckets)
        counts[-1] = array.size
    else:
        counts, edges = np.histogram(array, buckets)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def _png(pixels: Array) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "png")
    return file.getvalue()


publish(globals(), __all__, __name__)
