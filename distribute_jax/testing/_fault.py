"""``Fault``: failures that are injected into a process of a ``LocalCluster``."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from distribute_jax._checks import check_choice
from distribute_jax._errors import ArgumentError

START = "start"
"""The phase in which each process begins, before the module of its function is imported."""

_FOREVER_SECONDS = 1e6


@dataclass(frozen=True)
class Fault:
    """A failure that is injected once into one process of a ``LocalCluster``.

    It happens when the process reaches a step or a phase: strategies and loops of this library report
    them; in your own loop call ``dj.report_step(n)``. Each process begins in the phase ``"start"``, before
    the module of the function is imported.

    Args:
        kind: what happens:
            ``"kill"``: SIGKILL, as by the kernel when memory runs out;
            ``"terminate"``: SIGTERM, as before a preemption;
            ``"stop"``: SIGSTOP, forever or for some seconds;
            ``"stall"``: Python sleeps, forever or for some seconds;
            ``"hold_gil"``: the same in C code that lets no other thread run Python;
            ``"delay"``: a sleep of some seconds;
            ``"raise"``: a ``RuntimeError`` from the line that reports the step.
        process: the number of the process.
        at_step: at the first reported step that is at least this one.
        at_phase: or at the beginning of this phase: ``"start"``; in a job of several processes also
            ``"compiling"`` and ``"restoring"``.
        seconds: how long; None means forever.

    Raises:
        ValueError: an argument is not one of these.

    Example:
        >>> import distribute_jax as dj
        >>> dj.testing.Fault("kill", process=1, at_step=7)
        Fault(kind='kill', process=1, at_step=7, at_phase=None, seconds=None)
    """

    kind: str
    process: int = dataclasses.field(kw_only=True)
    at_step: int | None = dataclasses.field(default=None, kw_only=True)
    at_phase: str | None = dataclasses.field(default=None, kw_only=True)
    seconds: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, tuple(_KINDS))
        if (self.at_step is None) == (self.at_phase is None):
            raise ArgumentError(f"{self!r} must have one of at_step and at_phase.")
        lasting = ("stop", "stall", "hold_gil", "delay")
        if self.seconds is not None and not (self.kind in lasting and self.seconds > 0):
            raise ArgumentError(
                f"seconds must be above 0, and only for {', '.join(lasting)}; got {self!r}."
            )
        if self.kind == "delay" and self.seconds is None:
            raise ArgumentError(f"{self!r} must have seconds.")

    def is_due(self, step: int | None, phase: str) -> bool:
        """Returns True if it happens now: at or after the step, or in the phase.

        Args:
            step: the last step that the process reported; None before the first.
            phase: the phase of the process.
        """
        if self.at_phase is not None:
            return phase == self.at_phase or phase.startswith(f"{self.at_phase} ")
        return step is not None and self.at_step is not None and step >= self.at_step


class Injector:
    def __init__(self, faults: Iterable[Fault]) -> None:
        self._pending = list(faults)

    def __call__(self, step: int | None, phase: str) -> None:
        for fault in [fault for fault in self._pending if fault.is_due(step, phase)]:
            self._pending.remove(fault)
            _KINDS[fault.kind](fault)


def _send(number: int) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


def _stop(fault: Fault) -> None:
    if fault.seconds is not None:
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(
            ["/bin/sh", "-c", wake], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    os.kill(os.getpid(), signal.SIGSTOP)


def _stall(fault: Fault) -> None:
    time.sleep(_FOREVER_SECONDS if fault.seconds is None else fault.seconds)


def _hold_gil(fault: Fault) -> None:
    microseconds = int(1e6 * (fault.seconds or 60.0))
    library: Any = ctypes.PyDLL(None)  # unlike CDLL, it holds the GIL during the call
    library.usleep(microseconds)
    while fault.seconds is None:
        library.usleep(microseconds)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"injected by {fault!r}")


_KINDS: dict[str, Callable[[Fault], None]] = {
    "kill": _send(signal.SIGKILL),
    "terminate": _send(signal.SIGTERM),
    "stop": _stop,
    "stall": _stall,
    "hold_gil": _hold_gil,
    "delay": _stall,
    "raise": _raise,
}
