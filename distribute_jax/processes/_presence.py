"""What a process says of itself when a job meets, and the few words in which it is said."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distribute_jax._errors import ClusterError
from distribute_jax.processes._job import Member

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
