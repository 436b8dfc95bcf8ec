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

from distribute_jax._errors import DistributeError, StepFailedError
from distribute_jax._messages import error_text
from distribute_jax._supervision import DIVERGED, HUNG, OTHER_FAILED, SAVED
from distribute_jax.processes import _liveness as liveness
from distribute_jax.processes._job import Job
from distribute_jax.processes._liveness import Heartbeat, HeartbeatMonitor
from distribute_jax.processes._signals import exit_process, record_exit_code, requested_exit
from distribute_jax.processes._status import (
    COMPILING,
    RESTORING,
    Activity,
    activity,
    status_writer,
)

_POLL_SECONDS = 0.05
_CAUSE_SECONDS = 1.0
_COMPILING_FACTOR = 10
_HUNG = "hung/"
"""Where processes that saw no progress tell the others."""
_WAITED_FOR_ANOTHER = ("JaxRuntimeError", "StepFailedError", "DeadlineExceededError")
"""Errors of a process that waited for another."""


class ExitHandler:
    """Ends the process in order.

    When the program has ended, the process waits until all have, so that none loses the coordination
    service that it still needs; the watchdog bounds the wait. When the program ends with an exception,
    the others are told and the process exits at once: it would otherwise wait for the others, which wait
    for it.
    """

    def __init__(self, job: Job, watchdog: Watchdog) -> None:
        self._job, self._watchdog = job, watchdog
        self._code = 0
        self._excepthook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._on_error
        record_exit_code()
        atexit.register(self._on_exit)

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._code = 1
        is_local = issubclass(kind, DistributeError)  # whose lines name processes and values
        text = f"{kind.__name__}: {error if is_local else error_text(error)}"
        status_writer().error(text)
        # A step fails on all processes when one is gone, so that one may have the true reason.
        may_follow = issubclass(kind, (jax.errors.JaxRuntimeError, StepFailedError, TimeoutError))
        cause = self._cause() if may_follow else None
        if cause is None:
            # If process 0 is gone, the others are gone with it.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                first = liveness.announce_failure(self._job, text)
                cause = first if may_follow else None
        self._excepthook(kind, error, trace)
        if issubclass(kind, jax.errors.JaxRuntimeError):
            # JAX names the socket that failed, and not the process.
            processes = liveness.describe_processes()
            sys.stderr.write(f"distribute_jax: the job cannot go on.{processes}\n")
        if cause is not None:
            self._code = OTHER_FAILED
            status_writer().error(cause)
            sys.stderr.write(f"distribute_jax: {_ends_with(cause, activity().step)}\n")

    def _cause(self) -> str | None:
        """Waits a moment for the failure of another process."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while time.monotonic() < deadline:
                news = self._job.store.under(liveness.NEWS)
                if cause := liveness.failure_of_another(self._job, news):
                    return cause
                time.sleep(_POLL_SECONDS)
        return None

    def _on_exit(self) -> None:
        code, call = requested_exit()
        if code not in (0, SAVED) and not self._code:
            self._code = code
            status_writer().error(call)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                liveness.announce_failure(self._job, call)
        if self._code:
            exit_process(self._job, self._code)
        self._job.actions.publish()
        liveness.announce_left(self._job, activity().step)
        while len(liveness.last_steps(self._job)) < self._job.count:
            time.sleep(liveness.tick(self._job) / 10)
        if difference := self._job.actions.finish():
            exit_process(self._job, DIVERGED, difference)
        self._watchdog.stop()
        jax.distributed.shutdown()


class Watchdog:
    """A thread that writes heartbeats, and ends the process when it waits too long for the others.

    It ends the process after ``step_seconds`` without progress (exit code 43, with what each process is
    doing and the stacks of all threads), when another one was ended so, and when another one has failed
    (exit code 44). A timer in C, which the thread restarts again and again, ends the process where even
    this thread cannot run, because code in C holds Python's lock.
    """

    def __init__(self, job: Job, activity: Activity) -> None:
        self._job, self._activity = job, activity
        self._monitor = HeartbeatMonitor(job)
        self._numbers = count(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="distribute_jax watchdog", daemon=True
        )

    def start(self) -> None:
        """Starts the thread, after a first heartbeat."""
        self._send_heartbeat()
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and the timer."""
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        tick = liveness.tick(self._job)
        while not self._stop.wait(tick):
            # Twice as long, so that the message of this thread comes first where it can run.
            limit = 2 * self._job.options.step_seconds + tick
            faulthandler.dump_traceback_later(limit, exit=True)
            try:
                self._send_heartbeat()
                self._check()
            except jax.errors.JaxRuntimeError as error:
                if self._stop.is_set():
                    return
                first = str(error).split("\n", 1)[0]
                message = f"{self._job.name_of(0)} cannot be reached any more: {first}"
                exit_process(self._job, OTHER_FAILED, message)

    def _send_heartbeat(self) -> None:
        phase, since = self._activity.waiting() or (None, time.monotonic())
        seconds = round(time.monotonic() - since, 1)
        heartbeat = Heartbeat(next(self._numbers), self._activity.step, phase, seconds)
        liveness.send_heartbeat(self._job, heartbeat)

    def _check(self) -> None:
        if self._job.index == 0:
            self._monitor.look()
        news = self._job.store.under(liveness.NEWS)
        if failure := liveness.failure_of_another(self._job, news):
            if any(name in failure for name in _WAITED_FOR_ANOTHER):
                _dump_stacks()  # perhaps it waited for this process
            exit_process(self._job, OTHER_FAILED, _ends_with(failure, self._activity.step))
        for message in liveness.part(news, _HUNG).values():
            self._exit_hung(message)
        if difference := self._job.actions.compare(liveness.part(news, "actions/")):
            exit_process(self._job, DIVERGED, difference)
        waiting = self._activity.waiting()
        self._monitor.show({} if waiting is None else news)
        if waiting is None:
            return
        phase, since = waiting
        seconds = time.monotonic() - since
        name, limit = self._limit(phase, liveness.some_left(news))
        if seconds > limit:
            longer = 2 * getattr(self._job.options, name)
            self._exit_hung(
                f"process {self._job.index} has been {phase} for {seconds:.0f} s without progress."
                f"{liveness.describe_processes()}\nEvery process has to run the same steps in the same "
                f"order. If that may take longer, give it more time: dj.ClusterOptions({name}={longer:g})."
            )

    def _limit(self, phase: str, some_left: bool) -> tuple[str, float]:
        """Returns the option that limits a phase, and the seconds."""
        options = self._job.options
        if phase.startswith((COMPILING, RESTORING)):
            return "step_seconds", options.step_seconds * _COMPILING_FACTOR
        if options.shutdown_seconds < options.step_seconds and some_left:
            return "shutdown_seconds", options.shutdown_seconds  # who has left never comes
        return "step_seconds", options.step_seconds

    def _exit_hung(self, message: str) -> None:
        self._job.store.put(f"{liveness.NEWS}{_HUNG}{self._job.index}", message)
        _dump_stacks()
        exit_process(self._job, HUNG, message)


def _ends_with(failure: str, step: int) -> str:
    return f"{failure}\nThis process ends with it, at step {step}."


def _dump_stacks() -> None:
    sys.stderr.write("distribute_jax: the stacks of all threads follow.\n")
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
