"""The rendezvous of the processes of a job before JAX connects them.

JAX ends a process from C++ where another is missing, takes processes that disagree about their number,
and lets a second job on the same port end the first. So the processes meet here before, in plain
sockets, where each of these is an error in Python that every process raises with the same text.
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
from distribute_jax.processes._job import Member

_LINGER_SECONDS = 1.0
"""How long process 0 stays to tell an error to those that come late."""


def bound(address: str) -> tuple[socket.socket, str]:
    """Listens at an address of this machine, alone.

    Args:
        address: ``host:port``.

    Returns:
        The socket, and the ``host:port`` it is bound to: that interface and no other.

    Raises:
        ClusterError: another program listens there, or the host is not this machine.
    """
    host, port = split(address)
    family, _, _, _, where = resolved(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Ports of connections that have ended may be taken again; one that is listened at may not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"Process 0 of the job is to be met at {address}, and it cannot listen there: "
            f"{error.strerror}. Another program, or another job, may be using port {port}, or {host} is "
            "not this machine. Choose a port that is free on the machine of process 0, and give it to "
            "every process."
        ) from error
    shown = f"[{where[0]}]" if ":" in str(where[0]) else str(where[0])
    return listener, f"{shown}:{port}"


def call_roll(listener: socket.socket, mine: Presence, count: int, seconds: float) -> list[Member]:
    """Waits, as process 0, until all others have come, and lets them go on together.

    Returns:
        Who they are, in the order of the processes.

    Raises:
        DeadlineExceededError: somebody has not come; all that have are told.
        ProcessesDifferError: they disagree about what has to be the same.
    """
    present = {0: mine}
    open_: dict[int, socket.socket] = {}
    error: Exception | None = None
    with listener, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        deadline = time.monotonic() + seconds
        while error is None and len(present) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                error = _missing(present, count, seconds)
            for key, _ in selector.select(max(left, 0)):
                if key.fileobj is listener:
                    _greet(listener, selector)
                else:
                    error = error or _heard(key, selector, present, open_, mine, count)
        _answer(open_, error, present, count)
        if error is not None:
            _tell_latecomers(listener, selector, error)
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    if error is not None:
        raise error
    return [present[i].member for i in range(count)]


def _greet(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    connection.settimeout(GREETING_SECONDS)
    try:
        connection.sendall(GREETING)
    except OSError:
        connection.close()
        return
    selector.register(connection, selectors.EVENT_READ, bytearray())


def _heard(
    key: selectors.SelectorKey,
    selector: selectors.BaseSelector,
    present: dict[int, Presence],
    open_: dict[int, socket.socket],
    mine: Presence,
    count: int,
) -> Exception | None:
    """Takes what has arrived on a connection; gives the error that ends the roll call, if it is one."""
    connection: Any = key.fileobj
    try:
        part = connection.recv(LONGEST)
    except OSError:
        part = b""
    key.data.extend(part)
    if part and b"\n" not in key.data and len(key.data) < LONGEST:
        return None
    selector.unregister(connection)
    try:
        said = Presence.read(bytes(key.data))
    except ValueError:
        connection.close()
        return None
    if said.job != mine.job:
        _send(connection, {"error": _STRANGER})
        return None
    before = open_.get(said.process)
    if said.process in present and (before is None or _is_open(before)):
        _send(connection, {"error": _twice(said, present)})
        return None
    if before is not None:
        before.close()
    open_[said.process] = connection
    present[said.process] = said
    return _difference(present[0], said, count)


def _is_open(connection: socket.socket) -> bool:
    """Tells whether the process at the other end is still waiting."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _answer(
    open_: Mapping[int, socket.socket],
    error: Exception | None,
    present: Mapping[int, Presence],
    count: int,
) -> None:
    members = [
        [present[i].member.host, present[i].member.pid] for i in range(count) if i in present
    ]
    answer = {"members": members} if error is None else _as_answer(error)
    for connection in open_.values():
        _send(connection, answer)


def _as_answer(error: Exception) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _send(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    connection.settimeout(GREETING_SECONDS)
    with contextlib.suppress(OSError):  # it has gone
        connection.sendall(json.dumps(answer).encode() + b"\n")
    connection.close()


def _tell_latecomers(
    listener: socket.socket, selector: selectors.BaseSelector, error: Exception
) -> None:
    deadline = time.monotonic() + _LINGER_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.settimeout(GREETING_SECONDS)
                connection.sendall(GREETING)
                _send(connection, _as_answer(error))
            else:
                selector.unregister(key.fileobj)
                _send(key.fileobj, _as_answer(error))  # type: ignore[arg-type]


def _missing(present: Mapping[int, Presence], count: int, seconds: float) -> DeadlineExceededError:
    missing = [i for i in range(count) if i not in present]
    names = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
    came = ", ".join(f"{i} ({p.member})" for i, p in sorted(present.items())[:16])
    return DeadlineExceededError(
        f"{len(missing)} of {count} processes have not come within {seconds:g} s: process {names}. "
        f"Here: {came}. Start the missing ones and look at their output, or give the start more time: "
        "dj.ClusterOptions(start_seconds=...)."
    )


def _difference(first: Presence, other: Presence, count: int) -> ProcessesDifferError | None:
    keys = [*first.facts, *(key for key in other.facts if key not in first.facts)]
    lines = [
        f"  {key}: {first.facts.get(key, 'nothing')} on process 0, "
        f"{other.facts.get(key, 'nothing')} on process {other.process}"
        for key in keys
        if first.facts.get(key) != other.facts.get(key)
    ]
    if not lines and not 0 < other.process < count:
        lines = [f"  process ids: 0 to {count - 1} on process 0, and {other.process} has come"]
    if not lines:
        return None
    return ProcessesDifferError(
        "The processes of the job disagree about what has to be the same on all of them:\n"
        + "\n".join(lines)
        + "\nMake these equal and start all processes again."
    )


def _twice(said: Presence, present: Mapping[int, Presence]) -> str:
    return (
        f"Two processes say that they are process {said.process}: {present[said.process].member} and "
        f"{said.member}. Give each its own number, and end what is left of an earlier job."
    )


_STRANGER = (
    "This process belongs to another launch than the one it came to: an earlier attempt is still alive, or "
    "two jobs use one port. End what is left of the earlier job."
)


_RETRY_SECONDS = 0.1

_KINDS: Mapping[Any, type[Exception]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, ProcessesDifferError)
}


def answer_roll(address: str, mine: Presence, count: int, seconds: float) -> list[Member]:
    """Comes, as another process, to process 0 and waits until it may go on.

    Returns:
        Who the processes are, in their order.

    Raises:
        DeadlineExceededError: process 0, or another process, has not come.
        ProcessesDifferError: the processes disagree about what has to be the same.
        ClusterError: somebody else listens at the address.
    """
    deadline = time.monotonic() + seconds
    connection = _reached(address, mine, count, deadline, seconds)
    with connection, connection.makefile("rb") as lines:
        connection.settimeout(GREETING_SECONDS)
        if _line(lines) != GREETING:
            raise ClusterError(_somebody_else(address))
        connection.sendall(mine.line())
        # Process 0 began its own wait at another moment.
        connection.settimeout(max(deadline - time.monotonic(), 0) + seconds + GREETING_SECONDS)
        answer = _line(lines)
    if not answer:
        raise ClusterError(
            f"Process 0 at {address} ended while process {mine.process} of {count} waited for the others. "
            "Its own output says why."
        )
    told = json.loads(answer)
    if "error" in told:
        raise _KINDS.get(told.get("kind"), ClusterError)(told["error"])
    return [Member(str(host), int(pid)) for host, pid in told["members"]]


def _reached(
    address: str, mine: Presence, count: int, deadline: float, seconds: float
) -> socket.socket:
    host, port = split(address)
    reason = "nothing listens there"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(
                f"Process {mine.process} of {count} has waited {seconds:g} s for process 0, which is to be "
                f"met at {address}: {reason}. Start process 0 on {host}, let port {port} through the "
                "firewall, or give the start more time: dj.ClusterOptions(start_seconds=...)."
            )
        try:
            return socket.create_connection((host, port), timeout=min(left, GREETING_SECONDS))
        except OSError as error:
            reason = str(error.strerror or error)
            time.sleep(min(_RETRY_SECONDS, max(left, 0)))


def _line(lines: Any) -> bytes:
    try:
        line: bytes = lines.readline(LONGEST)
    except OSError:
        return b""
    return line


def _somebody_else(address: str) -> str:
    return (
        f"Process 0 of this job is to be met at {address}, and what listens there is something else: "
        f"another program, or another job that is running. Choose a port that is free on the machine of "
        "process 0, and give it to every process."
    )


Facts = Mapping[str, str]
"""What has to be the same on all processes, by name."""

GREETING = b'{"distribute_jax": "roll call"}\n'
"""By which a process knows that it has come to process 0 of some job."""

GREETING_SECONDS = 2.0
"""How long one message may take."""

LONGEST = 1 << 16
"""Bytes of one message."""


@dataclass(frozen=True)
class Presence:
    """What one process says of itself."""

    process: int
    facts: Facts
    job: str = ""
    """Tells the processes of one launch from those of another."""
    member: Member = field(default_factory=lambda: Member(socket.gethostname(), os.getpid()))

    def line(self) -> bytes:
        """Writes it down as one line."""
        said = [self.process, dict(self.facts), self.job, self.member.host, self.member.pid]
        return json.dumps(said).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Presence:
        """Reads such a line; a ValueError for anything else."""
        try:
            process, facts, job, host, pid = json.loads(line)
            named = {str(key): str(value) for key, value in facts.items()}
            return cls(int(process), named, str(job), Member(str(host), int(pid)))
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None


def split(address: str) -> tuple[str, int]:
    """Divides ``host:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolved(host: str, port: int) -> tuple[Any, ...]:
    """Looks a host up, as ``socket.getaddrinfo`` gives it."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ClusterError(
            f"Process 0 of the job is to be met at {host}:{port}, and the name {host!r} cannot be resolved "
            f"here: {error.strerror}. Give an address that every process can resolve."
        ) from error
