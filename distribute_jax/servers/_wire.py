"""Messages between processes: a line of JSON and arrays, over a pair of connected Unix sockets.

Nobody listens: the process that starts the others makes both ends and hands them on. No Python travels, and
nothing is unpickled. A message is the length of its head, the head, and the bytes of its arrays.
"""

from __future__ import annotations

import functools
import io
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

_LENGTH = struct.Struct(">I")
_SMALL_BYTES = 1 << 16
_ALIGNMENT = 64
"""Of arrays that JAX uses where they are; it copies less aligned NumPy arrays."""


class WireError(Exception):
    """The other end is gone, or has not answered in time."""


@dataclass(frozen=True)
class Message:
    """A request with plain values, or an answer, and arrays."""

    name: str
    plain: Sequence[Any] = ()
    """Values that JSON has."""
    arrays: Sequence[Any] = ()
    ends: Sequence[Any] = ()
    """Descriptors of sockets, which the receiver closes; actors of Ray."""

    def packed(self) -> list[Any]:
        """Returns its bytes but for the ends: first the head, then those of each array."""
        arrays = [np.ascontiguousarray(array) for array in map(np.asarray, self.arrays)]
        types = [(str(x.dtype), np.shape(y)) for x, y in zip(arrays, self.arrays, strict=True)]
        head = json.dumps([self.name, self.plain, types]).encode()
        parts = [array.reshape(-1).view(np.uint8).data for array in arrays]
        return [_LENGTH.pack(len(head)) + head, *parts]


def unpacked(data: bytes, ends: Sequence[Any] = ()) -> Message:
    """Returns the message of bytes that came in one piece."""
    return _read(io.BytesIO(data).readinto, ends)


def _read(fill: Callable[[Any], Any], ends: Sequence[Any]) -> Message:
    """Reads a message by a function that fills a buffer."""
    length = bytearray(_LENGTH.size)
    fill(memoryview(length))
    head = bytearray(*_LENGTH.unpack(length))
    fill(memoryview(head))
    name, plain, types = json.loads(head)
    arrays = [_empty(*of) for of in types]
    for array in arrays:
        fill(array.reshape(-1).view(np.uint8).data)
    return Message(name, plain, arrays, ends)


class Connection:
    """One end of a pair of sockets; all methods raise WireError if the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._sends, self._receives = end, threading.Lock(), threading.Lock()
        self.error = ""
        """Why the other end has ended, if it has sent a reason."""

    def send(self, message: Message) -> None:
        first, *parts = message.packed()
        # If it is small, in one piece, for which the receiver wakes up once.
        if sum(map(len, parts)) < _SMALL_BYTES:
            first, parts = b"".join([first, *parts]), []
        with self._sends, self._completing():
            sent = socket.send_fds(self._socket, [first], list(message.ends))
            for part in (memoryview(first)[sent:], *parts):
                self._socket.sendall(part)

    def receive(self) -> Message:
        """Waits for a message; also raises WireError if it is late, or says why the other end ends."""
        ends: list[int] = []
        try:
            with self._receives, self._completing():
                message = _read(functools.partial(self._fill, ends), ends)
                if message.name == "ended":
                    self.error = f": {message.plain[0]}"
                    raise WireError(f"it has ended{self.error}")
                return message
        except BaseException:
            for end in ends:
                os.close(end)
            raise

    @contextmanager
    def _completing(self) -> Iterator[None]:
        """Ends the connection if a message is not complete: the next would be taken for its rest."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if isinstance(error, OSError):
                raise WireError(f"the other process cannot be reached: {error}") from error
            raise

    def _fill(self, ends: list[int], view: memoryview) -> None:
        while view:
            size, descriptors, _, _ = self._socket.recvmsg_into([view], socket.CMSG_LEN(4))
            for _, _, data in descriptors:
                ends += np.frombuffer(data, np.intc).tolist()
            if not size:
                raise WireError("the other process has closed the connection")
            view = view[size:]

    def request(self, message: Message) -> Callable[[], Message]:
        self.send(message)
        return self.receive

    def ask(self, message: Message) -> Message:
        with self._completing():
            return self.request(message)()

    def limit(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()


def _empty(dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    kind = jnp.dtype(dtype)
    size = prod(shape) * kind.itemsize
    space = np.empty(size + _ALIGNMENT, np.uint8)
    start = -space.ctypes.data % _ALIGNMENT
    return space[start : start + size].view(kind).reshape(shape)
