"""Heartbeats, the watchdog and an orderly exit: no process waits forever, and all of a job end together.

If a process is stopped, or its machine is gone, JAX misses its heartbeats and aborts all other processes from
C++ with SIGABRT, which Python cannot prevent. So the reason is reported shortly before.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import count
from types import TracebackType
from typing import Any

import jax

from distribute_jax._errors import DeadlineExceededError, DistributeError, StepFailedError
from distribute_jax._messages import error_text, is_runtime_failure
from distribute_jax._supervision import AWAITED, DIVERGED, HUNG, OTHER_FAILED, SAVED
from distribute_jax.processes._job import Job, current_job
from distribute_jax.processes._signals import (
    exit_process,
    flush_output,
    record_exit_code,
    requested_exit,
    say,
)
from distribute_jax.processes._status import (
    COMPILING,
    RESTORING,
    SAVING,
    Activity,
    activity,
    doing,
    status_writer,
)

_MIN_TICK_SECONDS = 0.5
_MAX_BEATS_PER_SECOND = 100
"""Heartbeats of all processes; each takes 0.4 ms of process 0."""
_POLL_SECONDS = 0.05
_CAUSE_SECONDS = 1.0
_COMPILING_FACTOR = 10
_MAX_LINES = 64

_HEARTBEATS = "heartbeats/"
_NEWS = "news/"
"""The folder that each process reads at each tick: failures, processes that hang, have finished or send no
heartbeats, and the latest actions of process 0."""
_FINISHED, _FAILED, _SILENT = "left/", "failed", "silent/"
_HUNG = "hung/"
"""Messages of processes that made no progress."""
_STACKS = 2 if sys.__stderr__ else os.open(os.devnull, os.O_WRONLY)
"""The descriptor to which stacks are written: the program may have replaced ``sys.stderr``."""
_WAITED_FOR_ANOTHER = ("JaxRuntimeError", "StepFailedError", "DeadlineExceededError")
"""Errors that a process may have because it waited for another."""


@dataclass(frozen=True)
class Heartbeat:
    """What a process reports about itself at regular intervals."""

    number: int
    """Increases with each heartbeat."""
    step: int
    phase: str | None
    """What the process waits for; None if it does not wait."""
    seconds: float

    def __str__(self) -> str:
        if self.phase is None:
            return f"at step {self.step}, in your code"
        return f"at step {self.step}, {self.phase} for {self.seconds:.0f} s"


def tick(job: Job) -> float:
    """Returns the seconds between two heartbeats of a process."""
    return min(
        max(_MIN_TICK_SECONDS, job.count / _MAX_BEATS_PER_SECOND), job.options.heartbeat_seconds / 4
    )


def _entries_below(news: Mapping[str, str], folder: str) -> dict[str, str]:
    """Returns the entries below a folder, by the rest of their keys."""
    return {key[len(folder) :]: text for key, text in news.items() if key.startswith(folder)}


def _heartbeats(job: Job) -> dict[int, Heartbeat]:
    entries = job.store.under(_HEARTBEATS)
    return {int(process): Heartbeat(*json.loads(text)) for process, text in entries.items()}


def _finished_steps(job: Job) -> dict[str, str]:
    return job.store.under(_NEWS + _FINISHED)


def announce_failure(job: Job, text: str) -> str | None:
    """Announces that this process fails; returns the failure of another process if that came first.

    When a process fails the others fail too, in many ways: the first failure is the cause.
    """
    job.store.put_if_absent(_NEWS + _FAILED, json.dumps([job.index, text]))
    return _failure_of_another(job, job.store.under(_NEWS))


def _failure_of_another(job: Job, news: Mapping[str, str]) -> str | None:
    """Returns which other process has failed, and how; None if none has."""
    process, text = json.loads(news.get(_FAILED, f"[{job.index}, null]"))
    return None if process == job.index else f"{job.name_of(process)} failed: {text}"


def last_seen(job: Job, process: int) -> str:
    if step := _finished_steps(job).get(str(process)):
        return f": exited at step {step}, while the others continue"
    heartbeat = _heartbeats(job).get(process)
    return f": {heartbeat}" if heartbeat else ": has not been seen since the start"


def describe_processes() -> str:
    """Returns what every process is doing, as the end of a message; empty in a job of one process.

    It takes about a second, in which it sees which processes still write heartbeats.
    """
    job = current_job()
    if job.is_alone:
        return ""
    try:
        before = _heartbeats(job)
        time.sleep(_MIN_TICK_SECONDS + 2 * tick(job))
        lines = _lines(job, before, _heartbeats(job), _finished_steps(job))
    except jax.errors.JaxRuntimeError:
        return ""  # process 0 has ended
    return "\nAll processes of a job compute a step together. Where each is:\n" + "\n".join(lines)


@contextlib.contextmanager
def naming_other_processes(caller: str, is_alone: bool) -> Iterator[None]:
    """Lets the errors of a collective in the block name the processes that did not join it."""
    if is_alone:
        yield
        return
    try:
        with doing(f"waiting for all processes at {caller}"):
            yield
    except Exception as error:
        if not (is_runtime_failure(error) or isinstance(error, StepFailedError)):
            raise
        reason = error_text(error.__cause__ or error)
        is_late = "timed out" in reason.lower() or "DEADLINE_EXCEEDED" in reason
        kind = DeadlineExceededError if is_late else StepFailedError
        raise kind(
            f"{caller} failed, which all processes have to call together, in the same order: "
            f"{reason}{describe_processes()}"
        ) from error


def _lines(
    job: Job,
    before: Mapping[int, Heartbeat],
    after: Mapping[int, Heartbeat],
    finished: Mapping[str, str],
) -> list[str]:
    steps = [heartbeat.step for heartbeat in before.values()] or [0]
    somebody_waits = min(steps) < max(steps) or any(beat.phase for beat in before.values())
    lines = []
    for i in range(job.count):
        is_awaited = True
        if str(i) in finished:
            text = f"exited at step {finished[str(i)]}, while the others continue"
        elif i not in before:
            text = "no heartbeat since the start"
        elif before[i].number == after[i].number and i != job.index:  # which writes in this thread
            text = f"no heartbeat; last seen {before[i]}"
        else:
            text = str(before[i])
            is_awaited = before[i].phase is None and before[i].step == min(steps)
        mark = f"   {AWAITED}" if is_awaited and somebody_waits else ""
        lines.append(f"  {job.name_of(i)}: {text}{mark}")
    return lines[:_MAX_LINES]


class HeartbeatMonitor:
    """Reports processes whose heartbeats stopped: process 0 notices them, and every process shows them.

    A report is withdrawn when the heartbeats continue.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: dict[int, tuple[int, float]] = {}
        self._reported: set[int] = set()
        self._shown: set[str] = set()

    def look(self) -> None:
        """Publishes, on process 0, a report for each process whose heartbeats stopped."""
        now, limit = time.monotonic(), _silence_limit(self._job)
        for process, heartbeat in _heartbeats(self._job).items():
            number, since = self._last.get(process, (None, now))
            key = f"{_NEWS}{_SILENT}{process}"
            if number != heartbeat.number:
                self._last[process] = heartbeat.number, now
                if process in self._reported:
                    self._reported.remove(process)
                    self._job.store.remove(key)
            elif now - since > limit and process not in self._reported:
                self._reported.add(process)
                self._job.store.put(
                    key,
                    f"{self._job.name_of(process)} has sent no heartbeat for {now - since:.0f} s; last seen "
                    f"{heartbeat}.{_aborts(self._job)}",
                )

    def show(self, news: Mapping[str, str]) -> None:
        """Prints each report once, and clears the error of the status when no report is left."""
        silent = _entries_below(news, _SILENT)
        for process in silent.keys() - self._shown - {f"{self._job.index}"}:
            status_writer().error(silent[process])
            say(silent[process])
        if self._shown and not silent:
            status_writer().error("")
        self._shown = {*silent}


def _silence_limit(job: Job) -> float:
    """Returns the seconds without an answer after which a process is reported, before JAX aborts.

    JAX counts from a heartbeat that it sent itself, up to half of its timeout earlier.
    """
    return max(job.options.heartbeat_seconds / 2 - 1, 2.5 * tick(job))


def _aborts(job: Job) -> str:
    return (
        " If it is stopped or gone, JAX ends this process with SIGABRT after "
        f"{job.options.heartbeat_seconds} s (ClusterOptions.heartbeat_seconds)."
    )


class ExitHandler:
    """Makes the process exit in order.

    When its program has ended, the process waits until all have, since they still need the coordination
    service of process 0; the watchdog limits the wait. If the program ends with an exception, the process
    announces it and exits at once: otherwise it would wait for the others, which wait for it.
    A forked child that ends tells the job nothing.
    """

    def __init__(self, job: Job, watchdog: Watchdog) -> None:
        self._job, self._watchdog, self._pid = job, watchdog, os.getpid()
        self._code = 0
        self._excepthook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._on_error
        record_exit_code()
        atexit.register(self._on_exit)

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._code = 1
        if os.getpid() != self._pid:
            self._excepthook(kind, error, trace)
            return
        is_local = issubclass(kind, DistributeError)  # its further lines name processes and values
        text = f"{kind.__name__}: {error if is_local else error_text(error)}".removesuffix(": ")
        status_writer().error(text)
        # A step fails on all processes if one has failed, which then has the true reason.
        may_follow = issubclass(kind, (jax.errors.JaxRuntimeError, StepFailedError, TimeoutError))
        cause = self._cause() if may_follow else None
        # JAX's message names a socket, not a process.
        is_of_jax, processes = issubclass(kind, jax.errors.JaxRuntimeError), ""
        if cause is None and is_of_jax and "Timed out" in text:
            text += (processes := describe_processes())
            status_writer().error(text)
        if cause is None:
            # Without process 0 the others end too.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                first = announce_failure(self._job, text)
                cause = first if may_follow else None
        self._excepthook(kind, error, trace)
        if is_of_jax:
            say(f"the job cannot continue.{processes or describe_processes()}")
        if cause is not None:
            self._code = OTHER_FAILED
            status_writer().error(cause)
            say(_failure_text(cause, activity().step))

    def _cause(self) -> str | None:
        deadline = time.monotonic() + _CAUSE_SECONDS
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while time.monotonic() < deadline:
                news = self._job.store.under(_NEWS)
                if cause := _failure_of_another(self._job, news):
                    return cause
                time.sleep(_POLL_SECONDS)
        return None

    def _on_exit(self) -> None:
        code, call = requested_exit()
        error = getattr(sys, "last_value", None)  # also of a prompt, where it ended nothing
        if error is not None and not (self._code or call or hasattr(sys, "ps1")):
            self._excepthook = lambda *_: None  # the one that replaced it has printed the error
            self._on_error(type(error), error, error.__traceback__)
        if os.getpid() != self._pid:  # JAX would close the connections of the parent
            flush_output()
            os._exit(self._code or code)
        if code not in (0, SAVED) and not self._code:
            self._code = code
            status_writer().error(call)
        if self._code:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # where _on_error could not
                announce_failure(self._job, call or "an exception, which its output shows")
            exit_process(self._job, self._code)
        if not jax.distributed.is_initialized():  # the program has shut it down
            return
        try:
            self._await_others()
        except KeyboardInterrupt:
            text = "KeyboardInterrupt while it waited for the others to end"
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                announce_failure(self._job, text)
            exit_process(self._job, 1, text)

    def _await_others(self) -> None:
        self._job.actions.publish()
        self._job.store.put(f"{_NEWS}{_FINISHED}{self._job.index}", str(activity().step))
        while len(_finished_steps(self._job)) < self._job.count:
            time.sleep(tick(self._job) / 10)
        if difference := self._job.actions.finish():
            exit_process(self._job, DIVERGED, difference)
        self._watchdog.stop()
        jax.distributed.shutdown()


class Watchdog:
    """A thread that writes heartbeats, and ends the process if it waits too long for the others.

    It ends the process after ``step_seconds`` without progress, here or on another process (exit code 43,
    with what each process is doing and the stacks of all threads), and when another one has failed (exit
    code 44). If C code holds the GIL, so that the thread cannot run, a timer of ``faulthandler`` ends the
    process, which the thread otherwise restarts at each tick. If process 0 is stopped, the thread waits for
    its answer, and a second thread says so.
    """

    def __init__(self, job: Job, activity: Activity) -> None:
        self._job, self._activity = job, activity
        self._monitor = HeartbeatMonitor(job)
        self._numbers = count(1)
        self._stop = threading.Event()
        self._answers = 0
        """How often process 0 has answered."""
        watches = [self._watch] if job.index == 0 else [self._watch, self._watch_process_0]
        self._threads = [
            threading.Thread(target=watch, name="distribute_jax watchdog", daemon=True)
            for watch in watches
        ]

    def start(self) -> None:
        self._send_heartbeat()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        seconds = tick(self._job)
        while not self._stop.wait(seconds) and jax.distributed.is_initialized():
            # Twice as long, so that this thread, if it can run, is first with its message.
            limit = 2 * self._job.options.step_seconds + seconds
            faulthandler.dump_traceback_later(limit, exit=True, file=_STACKS)
            try:
                self._send_heartbeat()
                self._check()
                self._answers += 1
            except jax.errors.JaxRuntimeError as error:
                if self._stop.is_set() or not jax.distributed.is_initialized():
                    break
                first = str(error).split("\n", 1)[0]
                message = f"{self._job.name_of(0)} cannot be reached any more: {first}"
                exit_process(self._job, OTHER_FAILED, message)
        self._stop.set()  # also where the program itself has called jax.distributed.shutdown
        faulthandler.cancel_dump_traceback_later()

    def _watch_process_0(self) -> None:
        seconds, answers, is_reported = 0.0, self._answers, False
        while not self._stop.wait(tick(self._job)):
            # By ticks of this thread, since code that holds the GIL stops both.
            seconds = seconds + tick(self._job) if self._answers == answers else 0.0
            answers = self._answers
            is_silent = seconds > _silence_limit(self._job)
            if is_silent and not is_reported:
                text = f"{self._job.name_of(0)} has not answered for {seconds:.0f} s.{_aborts(self._job)}"
                status_writer().error(text)
                say(text)
            elif is_reported and not is_silent:
                status_writer().error("")
            is_reported = is_silent

    def _send_heartbeat(self) -> None:
        phase, since = self._activity.waiting() or (None, time.monotonic())
        seconds = round(time.monotonic() - since, 1)
        heartbeat = Heartbeat(next(self._numbers), self._activity.step, phase, seconds)
        self._job.store.put(f"{_HEARTBEATS}{self._job.index}", json.dumps(astuple(heartbeat)))

    def _check(self) -> None:
        if self._job.index == 0:
            self._monitor.look()
        news = self._job.store.under(_NEWS)
        if failure := _failure_of_another(self._job, news):
            if any(name in failure for name in _WAITED_FOR_ANOTHER):
                _dump_stacks()  # it may have waited for this process
            exit_process(self._job, OTHER_FAILED, _failure_text(failure, self._activity.step))
        for message in _entries_below(news, _HUNG).values():
            self._exit_hung(message)
        if difference := self._job.actions.compare(_entries_below(news, "actions/")):
            exit_process(self._job, DIVERGED, difference)
        waiting = self._activity.waiting()
        self._monitor.show({} if waiting is None else news)
        if waiting is None:
            return
        phase, since = waiting
        seconds = time.monotonic() - since
        name, limit = self._limit(
            phase, some_finished=any(key.startswith(_FINISHED) for key in news)
        )
        if seconds > limit:
            longer = 2 * getattr(self._job.options, name)
            self._exit_hung(
                f"process {self._job.index} has been {phase} for {seconds:.0f} s without progress."
                f"{describe_processes()}\nEvery process has to run the same steps in the same "
                f"order. If that may take longer, give it more time: dj.ClusterOptions({name}={longer:g})."
            )

    def _limit(self, phase: str, *, some_finished: bool) -> tuple[str, float]:
        options = self._job.options
        if phase.startswith((COMPILING, RESTORING, SAVING)):
            return "step_seconds", options.step_seconds * _COMPILING_FACTOR
        if options.shutdown_seconds < options.step_seconds and some_finished:
            return "shutdown_seconds", options.shutdown_seconds  # a finished process never comes
        return "step_seconds", options.step_seconds

    def _exit_hung(self, message: str) -> None:
        self._job.store.put(f"{_NEWS}{_HUNG}{self._job.index}", message)
        _dump_stacks()
        exit_process(self._job, HUNG, message)


def _failure_text(failure: str, step: int) -> str:
    return f"{failure}\nThis process exits because of it, at step {step}."


def _dump_stacks() -> None:
    say("the stacks of all threads follow.")
    faulthandler.dump_traceback(file=_STACKS, all_threads=True)
