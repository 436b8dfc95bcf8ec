"""Decides whether a job is restarted after an attempt: a pure function of the attempt's outcome."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distribute_jax._supervision import AWAITED, MEANING, SAVED

_MAX_ERROR_CHARS = 400
_TRANSIENT_ERROR = re.compile(
    r"[\w.]*(Runtime|Connection|ConnectionRe\w+|BrokenPipe|OS|URL|HTTP|Timeout|DeadlineExceeded|Memory)Error\b|"
    r"[\w.]*(Cluster|Service|StepFailed|ProcessFailed|CheckpointFile)Error\b"
)
"""Errors whose cause may be outside of the program, so that they need not recur after a restart."""
_MAX_DETAILS = 4


@dataclass(frozen=True)
class Progress:
    """The progress of a job over all attempts."""

    attempt: int = 0
    """The number of the current attempt, or of the one that has just ended."""
    best_step: int | None = None
    fruitless: int = 0
    """The number of successive restarts without a step beyond ``best_step``."""

    def after(self, outcome: AttemptOutcome) -> Progress:
        if outcome.best_step is not None and (
            self.best_step is None or outcome.best_step > self.best_step
        ):
            return Progress(self.attempt, outcome.best_step, 0)
        return Progress(self.attempt, self.best_step, self.fruitless + (self.attempt > 0))


@dataclass(frozen=True)
class Verdict:
    """What happens after an attempt."""

    progress: Progress
    exit_code: int | None
    """The exit code of the supervisor; None to restart all processes."""
    text: str
    """The reason, in one line; empty if the job succeeded."""
    pause: float = 0.0
    """Seconds to wait before the restart."""


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """A process that failed by itself."""

    process: int
    pid: int
    host: str
    code: int
    """The exit code, or minus the number of a signal."""
    error: str
    """The exception, or the last line of output; empty if neither is known."""
    step: int | None
    phase: str

    @property
    def exit_code(self) -> int:
        """The exit code as a shell shows it."""
        return self.code if self.code > 0 else 128 - self.code

    def __str__(self) -> str:
        where = "before it reported a step" if self.step is None else f"at step {self.step}"
        phase = f", {self.phase}" if self.phase else ""
        process = f"process {self.process} (pid {self.pid} on {self.host})"
        first, *rest = self.error.splitlines() or [""]
        details = [line.strip() for line in rest if line.startswith("  ")]
        if awaited := [line for line in details if AWAITED in line]:
            # The process that failed only waited for these.
            return f"{_listed(awaited)}; {process} {self._how('')} {where}{phase}"
        text = f"{_shortened(first)} {_listed(details)}" if details else _shortened(first)
        return f"{process} {self._how(text)} {where}{phase}"

    def _how(self, error: str) -> str:
        if self.code < 0:
            aborted = f" ({error})" if error and self.code == -signal.SIGABRT else ""
            return f"was ended by {signal_name(-self.code)}{aborted}"
        if self.code in MEANING:
            return f"{MEANING[self.code]}{f': {error}' if error else ''} (exit code {self.code})"
        return f"failed{f' with {error}' if error else ''} (exit code {self.code})"


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """How an attempt ended."""

    failure: ProcessFailure | None = None
    """The process that failed first; None if none failed by itself."""
    best_step: int | None = None
    all_saved: bool = False
    """True if all processes saved after a preemption."""
    any_saved: bool = False
    same_error_for_all: bool = False
    """True if all processes failed by themselves with the same error of the program."""
    rejoins: bool = False
    """True if the supervisor stopped it in order to restart with all processes."""
    stop_signal: int | None = None
    """The signal that asked the supervisor to stop, if one did."""
    killed: tuple[int, ...] = ()
    """The processes that were still running after the grace period, or at a second signal."""


def decide(
    outcome: AttemptOutcome, progress: Progress, max_restarts: int, max_pause: float = 0.0
) -> Verdict:
    """Returns whether to restart a job, with the progress of the next attempt."""
    now = progress.after(outcome)
    if outcome.stop_signal is not None:
        return _stopped(outcome, now, outcome.stop_signal)
    failure = outcome.failure
    if failure is None and not outcome.any_saved and not outcome.rejoins:
        return Verdict(now, 0, "")
    why = "all processes have saved after a preemption" if failure is None else str(failure)
    if outcome.rejoins:
        why = "stopped, so that the processes that had failed can rejoin"
    if now.fruitless >= max_restarts:
        code = SAVED if failure is None else failure.exit_code
        return Verdict(now, code, f"{_gave_up(now, max_restarts)}: {why}")
    if outcome.same_error_for_all and failure is not None and not now.best_step:
        same = "not restarted, since every process failed with the same error before the first step"
        return Verdict(now, failure.exit_code, f"{same}: {why}")
    then = Progress(now.attempt + 1, now.best_step, now.fruitless)
    pause = pause_after(now.fruitless, max_pause)
    return Verdict(then, None, f"{why}; {_restarting(then, max_restarts, pause)}", pause)


def is_same_program_error(failures: Sequence[ProcessFailure]) -> bool:
    """True if processes failed with the same error of the program, which would recur after a restart."""
    first = {re.sub(r"0x\w+|\d+", "", failure.error.partition("\n")[0]) for failure in failures}
    return len(first) == 1 and all(
        failure.code > 0
        and failure.code not in MEANING
        and failure.error
        and not _TRANSIENT_ERROR.match(failure.error)
        for failure in failures
    )


def pause_after(fruitless: int, longest: float) -> float:
    """Returns the seconds before a restart: 0 after progress, otherwise 1, 2, 4, … up to ``longest``."""
    return min(float(2 ** min(fruitless - 1, 60)), longest) if fruitless else 0.0


def _stopped(outcome: AttemptOutcome, progress: Progress, number: int) -> Verdict:
    state = (
        "all processes have saved and ended" if outcome.all_saved else "all processes have ended"
    )
    if outcome.killed:
        some = ", ".join(f"{process}" for process in outcome.killed[:16])
        state = (
            f"killed after the grace period, or at a second signal: process {some}. What they had not "
            "saved is lost; --grace gives them more time"
        )
    code = SAVED if outcome.all_saved else 128 + number
    return Verdict(progress, code, f"stopped by {signal_name(number)}: {state}")


def _gave_up(progress: Progress, max_restarts: int) -> str:
    if not max_restarts:
        return "not restarted (--max-restarts 0)"
    far = "its first step" if progress.best_step is None else f"step {progress.best_step}"
    beyond = "reached" if progress.best_step is None else "got beyond"
    return f"gave up, since none of the last {progress.fruitless} restarts {beyond} {far}"


def _restarting(progress: Progress, max_restarts: int, pause: float) -> str:
    when = f" in {pause:g} s" if pause else ""
    return (
        f"stopping the other processes; restarting all{when} (restart {progress.attempt}; "
        f"{progress.fruitless} of {max_restarts} allowed without progress)"
    )


def _listed(details: list[str]) -> str:
    left_out = len(details) - _MAX_DETAILS
    more = [f"and {left_out} more"] if left_out > 0 else []
    return "; ".join([*map(_shortened, details[:_MAX_DETAILS]), *more])


def _shortened(text: str) -> str:
    """Leaves out the middle of a long text: it begins with what failed, and ends with what to do."""
    half = _MAX_ERROR_CHARS // 2
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:half]} … {text[-half:]}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
