"""The rendezvous: the processes of a job exchange messages by sockets before JAX connects them.

JAX aborts a process from C++ if another is missing, accepts processes that disagree about their number, and
lets a second job on the same port abort the first. Here each of these is a Python error, which every process
raises with the same text.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distribute_jax._errors import ClusterError, DeadlineExceededError, ProcessesDifferError
from distribute_jax._supervision import PROCESS_ID, has_ended
from distribute_jax.processes._job import ProcessInfo

GREETING = b'{"distribute_jax": "rendezvous"}\n'
"""Shows a process that it has reached process 0 of a job."""

_GREETING_SECONDS = 2.0
_MAX_MESSAGE_BYTES = 1 << 16
_LINGER_SECONDS = 1.0
"""How long process 0 stays to send an error to late processes."""
_PROCESS_BYTES = 512
"""Bytes of the answer for each process."""
_RETRY_SECONDS = 0.1
_LOOK_SECONDS = 0.5
"""How often process 0 looks for processes that have ended."""
_BACKOFF_SECONDS = 0.01

_KINDS: Mapping[Any, type[Exception]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, ProcessesDifferError)
}
_OTHER_LAUNCH = (
    "This process and process 0 belong to different launches: an earlier attempt is still running, or "
    "two jobs use one port. End what is left of the earlier job."
)


@dataclass(frozen=True)
class Handshake:
    """What a process sends to process 0."""

    process: int
    facts: Mapping[str, str]
    """What must be equal on all processes, by name."""
    job: str = ""
    info: ProcessInfo = field(
        default_factory=lambda: ProcessInfo(socket.gethostname(), os.getpid())
    )

    def line(self) -> bytes:
        fields = [self.process, dict(self.facts), self.job, self.info.host, self.info.pid]
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Handshake:
        try:
            process, facts, job, host, pid = json.loads(line)
            texts = {str(key): str(value) for key, value in facts.items()}
            if not (type(process) is type(pid) is int):
                raise TypeError("not the number of a process")
            return cls(process, texts, str(job), ProcessInfo(str(host), pid))
        except (TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None


def listen(address: str) -> tuple[socket.socket, str]:
    """Listens at an address of this machine; returns the socket and the address that it is bound to."""
    host, port = _split(address)
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ClusterError(
            f"Process 0 of the job is expected at {address}, and the name {host!r} cannot be resolved here: "
            f"{error.strerror}. Give an address that every process can resolve."
        ) from error
    try:
        # SO_REUSEADDR, not SO_REUSEPORT: another program that listens must be an error.
        listener = socket.create_server(target, family=family, backlog=1024, reuse_port=False)
    except OSError as error:
        raise ClusterError(
            f"Process 0 of the job is expected at {address}, and it cannot listen there: {error.strerror}. "
            f"Another program, another job or a second process 0 may be using port {port}, or {host} is not "
            "this machine. Choose a port that is free on process 0's machine, and give it to every process."
        ) from error
    shown = f"[{target[0]}]" if ":" in str(target[0]) else str(target[0])
    return listener, f"{shown}:{port}"


def serve_rendezvous(
    listener: socket.socket, local: Handshake, count: int, seconds: float
) -> list[ProcessInfo]:
    """Waits, on process 0, until all have connected, or sends all an error; returns where they run."""
    with listener, selectors.DefaultSelector() as selector:
        return _Server(listener, selector, local, count).run(seconds)


class _Server:
    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        local: Handshake,
        count: int,
    ) -> None:
        self._listener, self._selector, self._count = listener, selector, count
        self._handshakes = {0: local}
        self._connections: dict[int, socket.socket] = {}
        self._error: Exception | None = None
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def run(self, seconds: float) -> list[ProcessInfo]:
        deadline = time.monotonic() + seconds
        is_launched = os.environ.get(PROCESS_ID) == "0"  # not a job inside one that was launched
        while self._error is None and (missing := {*range(self._count)} - {*self._handshakes}):
            ended = [i for i in missing if is_launched and has_ended(i)]
            if not ended and (now := time.monotonic()) < deadline:
                self._serve_until(min(deadline, now + _LOOK_SECONDS))
            else:
                how = f"and process {ended[0]} has ended" if ended else f"within {seconds:g} s"
                self._error = self._absent(sorted(missing), how)
        infos = [self._handshakes[i].info for i in sorted(self._handshakes)]
        answer: dict[str, Any] = {"processes": [[info.host, info.pid] for info in infos]}
        if self._error is not None:
            answer = _as_answer(self._error)
        for connection in self._connections.values():
            _send(connection, answer)
        if self._error is not None:  # late processes get it too
            deadline = time.monotonic() + _LINGER_SECONDS
            while time.monotonic() < deadline:
                self._serve_until(deadline)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        if self._error is not None:
            raise self._error
        return infos

    def _serve_until(self, deadline: float) -> None:
        ready = [key for key, _ in self._selector.select(max(deadline - time.monotonic(), 0))]
        for key in ready:
            if key.fileobj is not self._listener:
                self._receive(key)
        if any(key.fileobj is self._listener for key in ready):
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it was closed, or there are no descriptors left
            waiting = [key for key in self._selector.get_map().values() if key.data is not None]
            for key in waiting[:1]:  # without a message: a process of the job sends one at once
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
            time.sleep(_BACKOFF_SECONDS)
            return
        connection.settimeout(_GREETING_SECONDS)
        try:
            connection.sendall(GREETING)
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def _receive(self, key: selectors.SelectorKey) -> None:
        connection: Any = key.fileobj
        try:
            part = connection.recv(_MAX_MESSAGE_BYTES)
        except OSError:
            part = b""
        key.data.extend(part)
        if part and b"\n" not in key.data and len(key.data) < _MAX_MESSAGE_BYTES:
            return
        self._selector.unregister(connection)
        try:
            handshake = Handshake.read(bytes(key.data))
        except ValueError:
            connection.close()
            return
        process, first = handshake.process, self._handshakes[0]
        before = self._connections.get(process)
        if self._error is not None:
            _send(connection, _as_answer(self._error))
        elif handshake.job != first.job:
            _send(connection, {"error": _OTHER_LAUNCH})
        elif process in self._handshakes and (before is None or _is_open(before)):
            _send(connection, {"error": _duplicate_error(self._handshakes[process], handshake)})
        else:
            if before is not None:
                before.close()
            self._connections[process] = connection
            self._handshakes[process] = handshake
            self._error = _difference(first, handshake, self._count)

    def _absent(self, missing: list[int], how: str) -> DeadlineExceededError:
        names = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
        present = ", ".join(f"{i} ({h.info})" for i, h in sorted(self._handshakes.items())[:16])
        return DeadlineExceededError(
            f"{len(missing)} of {self._count} processes did not connect {how}: process {names}. Here: "
            f"{present}. Every process makes the strategy: start the missing ones and look at their output, "
            "or give the start more time: dj.ClusterOptions(start_seconds=...)."
        )


def _is_open(connection: socket.socket) -> bool:
    """True if the process at the other end is still waiting."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _as_answer(error: Exception) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _send(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    connection.settimeout(_GREETING_SECONDS)
    with contextlib.suppress(OSError):  # the process has ended
        connection.sendall(json.dumps(answer).encode() + b"\n")
    connection.close()


def _difference(first: Handshake, other: Handshake, count: int) -> ProcessesDifferError | None:
    lines = [
        f"  {key}: {first.facts.get(key, 'nothing')} on process 0, "
        f"{other.facts.get(key, 'nothing')} on process {other.process}"
        for key in {**first.facts, **other.facts}
        if first.facts.get(key) != other.facts.get(key)
    ]
    if not lines and not 0 < other.process < count:
        lines = [f"  process ids: 0 to {count - 1} on process 0, and {other.process} connected"]
    if not lines:
        return None
    return ProcessesDifferError(
        "The processes of the job disagree about what has to be the same on all of them:\n"
        + "\n".join(lines)
        + "\nMake these equal and start all processes again."
    )


def _duplicate_error(first: Handshake, second: Handshake) -> str:
    return (
        f"Two processes claim to be process {first.process}: {first.info} and {second.info}. Give each "
        "its own number, and end what is left of an earlier job."
    )


def join_rendezvous(
    address: str, local: Handshake, count: int, seconds: float
) -> list[ProcessInfo]:
    """Connects to process 0, and waits until all have connected; returns where they run."""
    deadline = time.monotonic() + seconds
    connection = _connect(address, local, count, deadline, seconds)
    with connection, connection.makefile("rb") as lines:
        connection.settimeout(_GREETING_SECONDS)
        if _read_line(lines) != GREETING:
            raise ClusterError(
                f"Process 0 of this job is expected at {address}, but something else listens there: "
                "another program, or another job that is running. Choose a port that is free on the machine "
                "of process 0, and give it to every process."
            )
        connection.sendall(local.line())
        # Process 0 may have begun its wait later.
        connection.settimeout(max(deadline - time.monotonic(), 0) + seconds + _GREETING_SECONDS)
        line = _read_line(lines, count)
    if not line.endswith(b"\n"):
        raise ClusterError(
            f"Process 0 at {address} ended while process {local.process} of {count} waited for the others. "
            "Its output has the reason."
        )
    answer = json.loads(line)
    if "error" not in answer:
        return [ProcessInfo(host, pid) for host, pid in answer["processes"]]
    raise _KINDS.get(answer.get("kind"), ClusterError)(answer["error"])


def _connect(
    address: str, local: Handshake, count: int, deadline: float, seconds: float
) -> socket.socket:
    host, port = _split(address)
    reason = "nothing listens there"
    is_launched = os.environ.get(PROCESS_ID) == str(local.process)
    while (left := deadline - time.monotonic()) > 0:
        if is_launched and has_ended(0):
            reason, seconds = "it has ended", round(seconds - left, 1)
            break
        try:
            return socket.create_connection((host, port), timeout=min(left, _GREETING_SECONDS))
        except OSError as error:
            reason = str(error.strerror or error)
            time.sleep(min(_RETRY_SECONDS, max(left, 0)))
    raise DeadlineExceededError(
        f"Process {local.process} of {count} has waited {seconds:g} s for process 0, which is expected at "
        f"{address}: {reason}. Start process 0 on {host}, let port {port} through the firewall, or give the "
        "start more time: dj.ClusterOptions(start_seconds=...)."
    )


def _read_line(lines: Any, processes: int = 1) -> bytes:
    with contextlib.suppress(OSError):
        return bytes(lines.readline(_MAX_MESSAGE_BYTES + processes * _PROCESS_BYTES))
    return b""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
