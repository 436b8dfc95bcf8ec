"""The watchdog of a process: nothing waits for ever, and all processes of a job end together."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any

import jax

from distribute_jax._errors import StepFailedError
from distribute_jax._messages import error_text
from distribute_jax.processes import _liveness as notes
from distribute_jax.processes._job import Job
from distribute_jax.processes._liveness import (
    Silence,
    all_left,
    failure_of_another,
    note_failed,
    note_left,
    roll_call,
)
from distribute_jax.processes._signals import asked, leave, listen_for_exit_code
from distribute_jax.processes._status import (
    COMPILING,
    HUNG,
    OTHER_FAILED,
    PARTED,
    RESTORING,
    SAVED,
    Pulse,
    own_status,
    pulse,
)

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
        listen_for_exit_code()
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


_COMPILING_FACTOR = 10
_WAITED = 1.0
"""Seconds after which a process that waits looks who gives no sign of life."""

_TOGETHER = ("JaxRuntimeError", "StepFailedError", "DeadlineExceededError")
"""Errors of a process that waited for another."""


class Watchdog:
    """A thread that tells the others where this process is, and looks at where they are.

    It ends the process where it has waited too long for the others (exit code 43, after a roll call and
    the stacks of all threads), where another one has been ended so, and where another one has failed (exit
    code 44). A timer in C, which the thread winds up again and again, ends the process where even this
    thread cannot run, because code in C holds Python's lock.
    """

    def __init__(self, job: Job, pulse: Pulse) -> None:
        """Watches a process.

        Args:
            job: the processes.
            pulse: what this one does.
        """
        self._job, self._pulse = job, pulse
        self._silence = Silence(job)
        self._turns = count(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="distribute_jax watchdog", daemon=True
        )

    def start(self) -> None:
        """Begins to watch."""
        self._tell()
        self._thread.start()

    def stop(self) -> None:
        """Watches no longer."""
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stop.wait(notes.TICK):
            self._wind_up()
            try:
                self._tell()
                self._look()
            except jax.errors.JaxRuntimeError as error:
                if self._stop.is_set():
                    return
                first = str(error).split("\n", 1)[0]
                leave(
                    self._job,
                    OTHER_FAILED,
                    f"{self._job.name_of(0)} cannot be reached any more: {first}",
                )

    def _wind_up(self) -> None:
        # Twice as long, so that the words of this thread come first where it can speak.
        limit = 2 * self._job.options.step_seconds + notes.TICK
        faulthandler.dump_traceback_later(limit, exit=True)

    def _tell(self) -> None:
        phase, since = self._pulse.waits() or (None, time.monotonic())
        seconds = round(time.monotonic() - since, 1)
        place = notes.Place(next(self._turns), self._pulse.step, phase, seconds)
        notes.note_place(self._job, place)

    def _look(self) -> None:
        if failure := notes.failure_of_another(self._job):
            if any(name in failure for name in _TOGETHER):
                _dump_stacks()  # perhaps it waited for this process
            words = f"{failure}\nThis process ends with it, at step {self._pulse.step}."
            leave(self._job, OTHER_FAILED, words)
        if verdict := notes.verdict(self._job):
            self._end_stuck(verdict)
        if parted := self._job.course.look():
            leave(self._job, PARTED, parted)
        waits = self._pulse.waits()
        if waits is not None and time.monotonic() - waits[1] > _WAITED:
            # Not before: a thousand processes would read a thousand notes each.
            self._silence.look(notes.places(self._job))
        if waits is not None and time.monotonic() - waits[1] > self._limit(waits[0]):
            self._end_stuck(self._verdict(*waits))

    def _limit(self, phase: str) -> float:
        options = self._job.options
        if phase.startswith((COMPILING, RESTORING)):
            return options.step_seconds * _COMPILING_FACTOR
        if notes.some_left(self._job):
            # Whoever has left does not come any more.
            return min(options.step_seconds, options.shutdown_seconds)
        return options.step_seconds

    def _verdict(self, phase: str, since: float) -> str:
        seconds, options = time.monotonic() - since, self._job.options
        limit = "step_seconds"
        if self._limit(phase) < options.step_seconds:  # somebody has left
            limit = "shutdown_seconds"
        return (
            f"process {self._job.index} is {phase} for {seconds:.0f} s, and nothing moves."
            f"{notes.roll_call()}\nEvery process has to run the same steps in the same order. Where that "
            f"may take longer, say so: dj.ClusterOptions({limit}={2 * getattr(options, limit):g})."
        )

    def _end_stuck(self, verdict: str) -> None:
        notes.note_stuck(self._job, verdict)
        _dump_stacks()
        leave(self._job, HUNG, verdict)


def _dump_stacks() -> None:
    sys.stderr.write("distribute_jax: the stacks of all threads follow.\n")
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
