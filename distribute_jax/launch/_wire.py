"""Messages between supervisors: short lines of JSON, each with a code that shows who wrote it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from distribute_jax._errors import ClusterError

SECRET = "DISTRIBUTE_JAX_SECRET"
"""A text that is the same on all machines of a job, and that nobody else knows."""

SILENCE = 10.0
"""After so many seconds without a line the other side is taken for gone."""

Message = dict[str, Any]
_LONGEST = 1 << 16
_GREETING = "distribute_jax"
_COUNT_FLAG = "--xla_force_host_platform_device_count"


class WireError(ClusterError):
    """What came over the wire is no message of this job."""


class Wire:
    """A connection between two supervisors.

    Args:
        connection: it; closed with the wire.
        key: what the codes are made with.
    """

    def __init__(self, connection: socket.socket, key: bytes = b"") -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()
        self.key = key

    def send(self, message: Message) -> None:
        """Sends a message; raises ``OSError`` where the other side is gone."""
        text = json.dumps(message).encode()
        with self._sending:
            self._connection.sendall(self._code(text) + b" " + text + b"\n")

    def receive(self, seconds: float = SILENCE) -> Message | None:
        """Returns the next message; None where either side has closed the connection.

        Raises:
            OSError: nothing was received for this many seconds, or the connection is broken.
            WireError: what was received is not a message of this job.
        """
        try:
            self._connection.settimeout(seconds)
            line = self._lines.readline(_LONGEST)
        except (OSError, ValueError):
            if self._lines.closed:  # another thread closed this wire while this one waited
                return None
            raise
        if not line:
            return None
        code, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or not hmac.compare_digest(code, self._code(text)):
            raise WireError(
                "a line came that no supervisor of this job has written: something else uses the port, or "
                f"{SECRET} is not the same on all machines"
            )
        message: Message = json.loads(text)
        return message

    def close(self) -> None:
        """Closes the connection, also under a thread that waits for a message."""
        with suppress(OSError):  # the other side was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()

    def _code(self, text: bytes) -> bytes:
        return hmac.digest(self.key, text, hashlib.sha256).hex().encode()


def greeting(nonce: str) -> Message:
    """Gives the first message, which the supervisor of node 0 sends to whoever comes.

    With its clock and its flags, so that ``distribute-jax doctor`` can compare them.
    """
    return {"greeting": _GREETING, "job": nonce, "clock": time.time(), "flags": own_flags()}


def own_flags() -> list[str]:
    """Gives the flags of XLA that have to be the same on all machines, sorted."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return sorted(flag for flag in flags if not flag.startswith(_COUNT_FLAG))


def job_of(message: Message | None) -> str:
    """Gives the job that a first message names; raises ``WireError`` where it is no greeting."""
    if message is None or message.get("greeting") != _GREETING:
        raise WireError("the connection was closed" if message is None else f"it said {message}")
    return str(message["job"])


def key_of(nonce: str) -> bytes:
    """Gives the key of a job, so that no message of one job is one of another."""
    return hmac.digest(os.environ.get(SECRET, "").encode(), nonce.encode(), hashlib.sha256)
