"""Messages between processes: a line of JSON and arrays, over a pair of connected Unix sockets.

Nobody listens: the process that starts the others makes both ends and hands them on. No Python travels, and
nothing is unpickled. A message is its magic, the length of its head, the head, and the bytes of its arrays.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

_START = struct.Struct(">4sI")
_MAGIC = b"dj 1"
_SMALL = 1 << 16
_LONGEST_HEAD = 1 << 26
_LARGEST_ARRAY = 1 << 40


class WireError(Exception):
    """The other end is gone, or did not send a message."""


@dataclass(frozen=True)
class Message:
    """What is sent: a request with plain values, or an answer, and arrays."""

    name: str
    plain: Sequence[Any] = ()
    """Values that JSON has."""
    arrays: Sequence[Any] = ()
    ends: Sequence[int] = ()
    """Descriptors of sockets, which the receiver closes."""


class Connection:
    """One end of a pair of sockets; one thread at a time sends, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        """Takes an end of a pair."""
        self._socket = end

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            WireError: the other end is gone.
        """
        arrays = [np.ascontiguousarray(array) for array in map(np.asarray, message.arrays)]
        types = [(str(x.dtype), np.shape(y)) for x, y in zip(arrays, message.arrays, strict=True)]
        head = json.dumps([message.name, message.plain, types]).encode()
        try:
            first = _START.pack(_MAGIC, len(head)) + head
            parts = [array.reshape(-1).view(np.uint8).data for array in arrays]
            if sum(map(len, parts)) < _SMALL:  # in one piece, for which the receiver wakes up once
                first, parts = b"".join([first, *parts]), []
            sent = socket.send_fds(self._socket, [first], list(message.ends))
            for part in (memoryview(first)[sent:], *parts):
                self._socket.sendall(part)
        except OSError as error:
            raise WireError(f"the other process cannot be reached: {error}") from error

    def receive(self) -> Message:
        """Waits for a message.

        Raises:
            WireError: the other end is gone, it sent something else, or it took longer than the limit.
        """
        ends: list[int] = []
        try:
            start = bytearray()
            while len(start) < _START.size:
                data, more, _, _ = socket.recv_fds(self._socket, _START.size - len(start), 1)
                ends += more
                if not data:
                    raise WireError("the other process has closed the connection")
                start += data
            magic, size = _START.unpack(start)
            return self._rest(magic, size, ends)
        except BaseException as error:
            for end in ends:
                os.close(end)
            if isinstance(error, OSError):
                raise WireError(f"the other process cannot be reached: {error}") from error
            raise

    def _rest(self, magic: bytes, size: int, ends: list[int]) -> Message:
        if magic != _MAGIC or size > _LONGEST_HEAD:
            raise WireError("these bytes are not a message")
        head = bytearray(size)
        self._fill(memoryview(head))
        try:
            name, plain, types = json.loads(head)
            arrays = [_empty(*of) for of in types]
            if not (isinstance(name, str) and isinstance(plain, list)):
                raise TypeError
        except (ValueError, TypeError, MemoryError, RecursionError) as error:
            raise WireError("these bytes are not a message") from error
        for array in arrays:
            self._fill(array.reshape(-1).view(np.uint8).data)
        return Message(name, plain, arrays, ends)

    def _fill(self, view: memoryview) -> None:
        while view:
            if not (size := self._socket.recv_into(view)):
                raise WireError("the other process has closed the connection")
            view = view[size:]

    def ask(self, message: Message) -> Message:
        """Sends a message and waits for the answer."""
        self.send(message)
        return self.receive()

    def limit(self, seconds: float | None) -> None:
        """Sets how long to wait for the other end at most."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Closes this end; the other notices it."""
        self._socket.close()


def _empty(dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """Returns an array to fill; refuses what is no array of numbers, and what nobody can have sent."""
    kind = jnp.dtype(dtype)
    if kind.hasobject or not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError
    if prod(shape) * kind.itemsize > _LARGEST_ARRAY:
        raise MemoryError
    return np.empty(shape, kind)


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
