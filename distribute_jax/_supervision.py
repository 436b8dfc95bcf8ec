"""The protocol of a supervisor and the processes of its job: variables, exit codes, the status file.

Nothing here needs JAX, so that a supervisor does not import it.

The status file is memory-mapped: writing needs no system call, and the last status outlives the process,
however it ended. The layout is the number of steps and two texts, each ended by a zero byte.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NUM_PROCESSES = "DISTRIBUTE_JAX_NUM_PROCESSES"
PROCESS_ID = "DISTRIBUTE_JAX_PROCESS_ID"
LOCAL_PROCESS_ID = "DISTRIBUTE_JAX_LOCAL_PROCESS_ID"
JOB = "DISTRIBUTE_JAX_JOB"
"""A unique number in hex."""
ATTEMPT = "DISTRIBUTE_JAX_ATTEMPT"
"""The number of earlier starts: 0, 1, …"""
ADDRESS = "DISTRIBUTE_JAX_ADDRESS"
"""Where process 0 listens, as ``host:port``."""
JOB_FOLDER = "DISTRIBUTE_JAX_JOB_FOLDER"
"""A folder of this job on this machine, which only this user can read."""
STATUS = "DISTRIBUTE_JAX_STATUS"
"""The status file of this process, in that folder."""

SAVED = 42
"""All processes saved at one common step after a preemption."""
HUNG = 43
"""The watchdog ended this process, which made no progress."""
OTHER_FAILED = 44
"""This process ended because another one failed."""
DIVERGED = 45
"""The processes no longer execute the same steps."""

MEANING = {
    SAVED: "saved after a preemption",
    HUNG: "made no progress and was ended by its watchdog",
    OTHER_FAILED: "ended because another process failed",
    DIVERGED: "diverged from the others",
}
"""How the supervisor describes a process that ended with the code."""

GRACE_SECONDS = 30.0
"""The default time for the processes of a job to save when it is asked to stop."""

AWAITED = "<- the others wait for it"
"""Marks a process in a list of what each of them does."""

DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

ENDED = ".ended"
"""Suffix of an empty file beside the status of a process that has ended without an error."""

SIZE = 4096
PHASE = slice(64, 192)
ERROR = slice(192, SIZE)


@dataclass(frozen=True)
class Status:
    """What a process reported last."""

    step: int | None
    """The last training step that began; None before the first."""
    phase: str
    """Such as ``"compiling"``; may be empty."""
    error: str
    """The exception that ends the process; empty without one."""


def read_status(path: str | os.PathLike[str]) -> Status:
    """Returns the last status of a process; an empty one if the file is missing.

    A process that was killed while writing a text may leave half of it.
    """
    try:
        raw = Path(path).read_bytes().ljust(SIZE, b"\0")
    except FileNotFoundError:
        raw = bytes(SIZE)
    (steps,) = struct.unpack_from("=q", raw)
    return Status(step_in(steps), _text(raw[PHASE]), _text(raw[ERROR]))


def has_ended(process: int) -> bool:
    """True if a process of this job has ended without an error; False without a supervisor."""
    job = os.environ.get(STATUS, "").rpartition("-")[0]
    return bool(job) and Path(f"{job}-{process}{ENDED}").exists()


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


def step_in(count: int) -> int | None:
    """Returns the last step, for the number of steps in a status file."""
    return count - 1 if count else None


def xla_flags(environment: Mapping[str, str]) -> list[str]:
    """Returns XLA's flags without the number of simulated CPU devices."""
    return DEVICE_COUNT.sub("", environment.get("XLA_FLAGS", "")).split()


def pool_threads(devices: int, environment: Mapping[str, str]) -> str:
    """Returns NPROC, the size of XLA's thread pool: with fewer, collectives of steps in flight deadlock."""
    before = environment.get("NPROC", "")
    return str(max(2 * devices, int(before) if before.isdecimal() else 0))
