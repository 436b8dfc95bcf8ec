"""How a process of a job ends: together with the others, or at once, with its own text last."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from distribute_jax._errors import StepFailedError
from distribute_jax._tree import error_text
from distribute_jax.cluster._exit_codes import OTHER_FAILED, PARTED, SAVED
from distribute_jax.cluster._status import own_status
from distribute_jax.processes._exit_code import asked, listen
from distribute_jax.processes._job import Job
from distribute_jax.processes._last_words import leave
from distribute_jax.processes._notes import (
    all_left,
    failure_of_another,
    note_failed,
    note_left,
    roll_call,
)
from distribute_jax.processes._pulse import pulse
from distribute_jax.processes._watchdog import Watchdog

_LOOK_SECONDS = 0.05
_CAUSE_SECONDS = 1.0


class End:
    """Ends the process in order.

    Where the program has come to its end, the process waits until all have, so that none loses the
    coordination service that it still needs; the watchdog sees to it that the wait ends. Where the
    program ends with an exception, the others are told and the process leaves at once: it would
    otherwise wait for the others, which wait for it.
    """

    def __init__(self, job: Job, watchdog: Watchdog) -> None:
        """Takes over the end of this process."""
        self._job, self._watchdog = job, watchdog
        self._code = 0
        self._before: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._on_error
        listen()
        atexit.register(self._on_exit)

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._code = 1
        text = f"{kind.__name__}: {error_text(error)}"
        own_status().error(text)
        # A step fails on all processes where one is gone, so that one may have the true reason.
        together = issubclass(kind, (jax.errors.JaxRuntimeError, StepFailedError, TimeoutError))
        cause = self._cause() if together else None
        if cause is None:
            # Where process 0 is gone, the others are gone with it.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                first = note_failed(self._job, text)
                cause = first if together else None
        self._before(kind, error, trace)
        if issubclass(kind, jax.errors.JaxRuntimeError):
            # JAX says which socket failed, and not which process.
            sys.stderr.write(f"distribute_jax: the job cannot go on.{roll_call()}\n")
        if cause is not None:
            self._code = OTHER_FAILED
            own_status().error(cause)
            sys.stderr.write(
                f"distribute_jax: {cause}\nThis process ends with it, at step {pulse().step}.\n"
            )

    def _cause(self) -> str | None:
        """Waits a moment for the word of a process that has failed."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < deadline:
            try:
                if cause := failure_of_another(self._job):
                    return cause
            except jax.errors.JaxRuntimeError:
                return None
            time.sleep(_LOOK_SECONDS)
        return None

    def _on_exit(self) -> None:
        code, said = asked()
        if code not in (0, SAVED) and not self._code:
            self._code = code
            own_status().error(said)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                note_failed(self._job, said)
        if self._code:
            leave(self._job, self._code)
        self._job.course.publish()
        note_left(self._job, pulse().step)
        while not all_left(self._job):
            time.sleep(_LOOK_SECONDS)
        if parted := self._job.course.settle():
            leave(self._job, PARTED, parted)
        self._watchdog.stop()
        jax.distributed.shutdown()
