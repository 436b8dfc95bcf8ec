"""Reads event files with the protocol buffers of tensorboardX."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.types_pb2 import DataType


class Entry(NamedTuple):
    tag: str
    step: int
    plugin: str
    data: Any
    """An array of numbers, or the byte strings of a tensor of strings with its shape."""


def read(folder: Path) -> list[Entry]:
    """Returns the values of the only event file in a folder."""
    (file,) = folder.glob("events.out.tfevents.*")
    first, *events = (Event.FromString(record) for record in _records(file.read_bytes()))
    assert first.file_version == "brain.Event:2"
    return [_entry(event) for event in events]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the steps and numbers of each tag in a folder."""
    tags: dict[str, list[tuple[int, float]]] = {}
    for entry in read(folder):
        assert entry.plugin == "scalars"
        tags.setdefault(entry.tag, []).append((entry.step, float(entry.data)))
    return tags


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a TFRecord file without checking their checksums."""
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield data[12 : 12 + length]
        data = data[16 + length :]


def _entry(event: Event) -> Entry:
    assert event.wall_time > 1.6e9  # seconds since 1970
    (value,) = event.summary.value
    tensor = value.tensor
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if tensor.dtype == DataType.DT_STRING:
        data: Any = list(tensor.string_val), shape
    else:
        dtype = {DataType.DT_FLOAT: np.float32, DataType.DT_DOUBLE: np.float64}[tensor.dtype]
        data = np.frombuffer(tensor.tensor_content, dtype).reshape(shape)
    return Entry(value.tag, event.step, value.metadata.plugin_data.plugin_name, data)
