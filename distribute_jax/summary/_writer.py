"""Writers of event files, which one is current, and the formats: protobuf events, TFRecord.

Numbers and types of the fields are those of event.proto, summary.proto, tensor.proto and
tensor_shape.proto: https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distribute_jax._errors import ArgumentError, ContextError
from distribute_jax.processes import is_chief

_NUMBERS = count()
_current: ContextVar[tuple[SummaryWriter, int | None] | None] = ContextVar("writer", default=None)


class SummaryWriter:
    """Writes summaries into one event file, which TensorBoard reads.

    In a job of several processes only the first one writes; the calls do nothing in the others.
    ``create_file_writer`` makes one.

    Args:
        logdir: the folder of the file; it is made if it is missing.
        filename_suffix: the end of the file's name.

    Source: https://www.tensorflow.org/api_docs/python/tf/summary/SummaryWriter
    """

    def __init__(self, logdir: str | os.PathLike[str], filename_suffix: str = ".v2") -> None:
        self._file: BinaryIO | None = None
        self._closed = False
        if not is_chief():
            return
        folder = Path(logdir)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # Two writers of one second, also of one process, have files of their own.
        name = (
            f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        )
        self._file = (folder / (name + filename_suffix)).open("xb")
        self._file.write(framed(first_event(now)))
        self._file.flush()
        weakref.finalize(self, self._file.close)  # as in TensorFlow, nobody has to close it

    @contextmanager
    def as_default(self, step: int | None = None) -> Iterator[SummaryWriter]:
        """Makes this the writer of ``dj.summary.scalar`` and so on in the block; flushes at its end.

        Args:
            step: the step of calls that name none.
        """
        token = _current.set((self, step))
        try:
            yield self
        finally:
            _current.reset(token)
            self.flush()

    def set_as_default(self, step: int | None = None) -> None:
        """Makes this the current writer from here on; see ``as_default``."""
        _current.set((self, step))

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        if self._file is not None and not self._closed:
            self._file.flush()

    def close(self) -> None:
        """Closes the file; the writer takes nothing more."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _write(self, value: bytes, step: int) -> bool:
        if self._closed:
            raise ContextError(
                "This summary writer is closed. Make another one: dj.summary.create_file_writer(logdir)."
            )
        if self._file is None:
            return False
        self._file.write(framed(event(time.time(), step, value)))
        return True


def create_file_writer(
    logdir: str | os.PathLike[str], *, filename_suffix: str = ".v2"
) -> SummaryWriter:
    """Makes a writer of an event file in a folder.

    Args:
        logdir: the folder; it is made if it is missing.
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
    found = _current.get()
    if writer is None and found is not None:
        writer = found[0]
    if writer is not None:
        writer.flush()


def current(called: str, step: object) -> tuple[SummaryWriter, int] | None:
    """Gives the current writer and the step; None where there is no writer.

    Args:
        called: the function, for messages.
        step: what it was given: a whole number, or None for that of ``as_default``.
    """
    found = _current.get()
    if found is None:
        return None
    writer, default = found
    chosen = default if step is None else step
    try:
        number = int(chosen)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = None
    if number is None or number != chosen:
        raise ArgumentError(
            f"dj.summary.{called} got step={chosen!r}. Pass a whole number, step=…, or give all calls of "
            "a block one: writer.as_default(step=…)."
        )
    return writer, number


_VARINT, _FIXED64, _BYTES = 0, 1, 2
"""Protobuf's wire types."""

_DTYPES = {"float32": 1, "float64": 2, "string": 7}
_DATA_CLASSES = {"scalars": 1, "histograms": 2, "text": 2, "images": 3}
"""What kind of data a plugin of TensorBoard shows: a scalar, a tensor, or a sequence of files."""


def first_event(wall_time: float) -> bytes:
    """Gives the event at the start of a file, which names the version of the format."""
    return _double(1, wall_time) + _bytes(3, b"brain.Event:2")


def event(wall_time: float, step: int, value: bytes) -> bytes:
    """Gives an event with one value of a summary."""
    return _double(1, wall_time) + _integer(2, step) + _bytes(5, _bytes(1, value))


def summary_value(tag: str, plugin: str, tensor: bytes, description: str | None) -> bytes:
    """Gives the value of a tag, and which plugin of TensorBoard shows it."""
    metadata = _bytes(1, _bytes(1, plugin.encode()))
    if description is not None:
        metadata += _bytes(3, description.encode())
    metadata += _integer(4, _DATA_CLASSES[plugin])
    return _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, metadata)


def number_tensor(array: np.ndarray[Any, Any]) -> bytes:
    """Gives a tensor of float32 or float64."""
    content = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return _header(array.dtype.name, array.shape) + _bytes(4, content)


def string_tensor(parts: Sequence[bytes], shape: Sequence[int]) -> bytes:
    """Gives a tensor of byte strings, row by row."""
    return _header("string", shape) + b"".join(_bytes(8, part) for part in parts)


def _header(dtype: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_bytes(2, _integer(1, size)) for size in shape)
    return _integer(1, _DTYPES[dtype]) + _bytes(2, dims)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF  # a negative int64 is its two's complement
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _integer(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number)


def _double(field: int, number: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", number)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(data)) + data


_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with its bits reversed."""


def _table() -> tuple[int, ...]:
    sums = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        sums.append(byte)
    return tuple(sums)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Gives the CRC-32C of some bytes."""
    state = 0xFFFFFFFF
    for byte in data:
        state = (state >> 8) ^ _TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    """Gives the sum as TFRecord stores it: rotated, so that a sum over sums stays a good one."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Makes one record of a file.

    Source: https://www.tensorflow.org/tutorials/load_data/tfrecord
    """
    length = struct.pack("<Q", len(data))
    sums = (struct.pack("<I", masked_crc(part)) for part in (length, data))
    return length + next(sums) + data + next(sums)
