"""The server that passes messages between supervisors of several machines, and their format."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

from distribute_jax._errors import ClusterError

_GOODBYE = 5.0


class Hub:
    """Accepts one supervisor of each machine, and sends to all what one has to tell all.

    A ``gather`` is answered to all once every machine has given its value; a ``shout`` goes to the others at
    once, and so does the loss of a machine.

    Args:
        address: the host, which is one of this machine, and the port to listen at.
        layout: what all machines must have in common.
        nodes: how many machines there are.

    Raises:
        ClusterError: somebody listens there, or the host is not this machine.
    """

    def __init__(self, address: tuple[str, int], layout: Message, nodes: int) -> None:
        self._layout = layout
        self._nodes = nodes
        self._nonce = secrets.token_hex(8)
        self._key = key_of(self._nonce)
        self._wires: dict[int, Wire] = {}
        self._values: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._lock = threading.RLock()
        self._server = _exclusive(address)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening, once every machine has taken leave or the time for that is over."""
        limit = time.monotonic() + _GOODBYE
        while self._wires and time.monotonic() < limit:
            time.sleep(0.01)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        wire = Wire(connection)
        node = None
        goodbye = False
        try:
            wire.send(greeting(self._nonce))
            wire.key = self._key
            node = self._joined(wire)
            while node is not None and not goodbye and (message := wire.receive()) is not None:
                goodbye = message["kind"] == "goodbye"
                self._handle(node, wire, message)
        except (OSError, WireError):
            pass  # as good as closed: the others hear of it below
        finally:
            if node is not None:
                self._forget(node, told=not goodbye)
            wire.close()

    def _joined(self, wire: Wire) -> int | None:
        """Lets a machine in and gives its rank, or tells it why not."""
        message = wire.receive()
        if message is None or message["kind"] != "join":
            return None
        node = int(message["node"])
        with self._lock:
            reason = self._refusal(node, message["layout"])
            if not reason:
                self._wires[node] = wire
        wire.send({"kind": "refused", "reason": reason} if reason else {"kind": "welcome"})
        return None if reason else node

    def _refusal(self, node: int, layout: Message) -> str:
        differing = [
            f"{name}: {self._layout.get(name)!r} on node 0, {layout.get(name)!r} on node {node}"
            for name in {**self._layout, **layout}
            if self._layout.get(name) != layout.get(name)
        ]
        if differing:
            return (
                "the port is in use by another job, or the commands of one job differ: "
                + "; ".join(differing)
            )
        if node in self._wires:
            return (
                f"the port is in use by another job, or two machines were started with --node-rank {node}: a "
                "machine of this rank is there already"
            )
        return ""

    def _handle(self, node: int, wire: Wire, message: Message) -> None:
        if message["kind"] == "alive":
            wire.send({"kind": "alive", "here": sorted(self._wires)})
        elif message["kind"] == "shout":
            self._tell({**message, "node": node}, but=node)
        elif message["kind"] == "gather":
            with self._lock:
                values = self._values[message["name"]]
                values[node] = message["value"]
                complete = len(values) == self._nodes
            if complete:
                told = [values[i] for i in range(self._nodes)]
                self._tell({"kind": "gathered", "name": message["name"], "values": told})

    def _tell(self, message: Message, but: int | None = None) -> None:
        with self._lock:
            wires = [wire for node, wire in self._wires.items() if node != but]
        for wire in wires:
            with suppress(OSError):  # its own thread finds out
                wire.send(message)

    def _forget(self, node: int, told: bool) -> None:
        with self._lock:
            self._wires.pop(node, None)
        if told:
            self._tell({"kind": "lost", "node": node})


def _exclusive(address: tuple[str, int]) -> socket.socket:
    """Listens at an address, alone: who shares the port would end the job that has it."""
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, reuse_port=False)
    except OSError as error:
        raise ClusterError(
            f"--coordinator {host}:{port}: the supervisor of node 0 cannot listen there: {error}. The "
            "port is in use by another job, or the host is not this machine: choose another port, or "
            "start --node-rank 0 on the machine with this address."
        ) from error


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
