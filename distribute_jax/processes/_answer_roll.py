"""How every process but the first comes to the roll call, and hears whether the job may go on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from distribute_jax._errors import ClusterError, DeadlineExceededError, ProcessesDifferError
from distribute_jax.processes._job import Member
from distribute_jax.processes._presence import (
    GREETING,
    GREETING_SECONDS,
    LONGEST,
    Presence,
    split,
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
