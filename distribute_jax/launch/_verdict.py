"""Whether a job is restarted after an attempt: a pure function of how the attempt ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distribute_jax._supervision import AWAITED, MEANING, OTHER_FAILED, SAVED

_LONGEST = 400
_MAY_PASS = re.compile(
    r"[\w.]*(Runtime|Connection|ConnectionRe\w+|BrokenPipe|OS|URL|HTTP|Timeout|DeadlineExceeded|Memory)Error\b|"
    r"[\w.]*(Cluster|Service|StepFailed|ProcessFailed|CheckpointFile)Error\b"
)
"""Errors whose cause may be outside of the program, so that a restart may help."""
_MOST_DETAILS = 4


@dataclass(frozen=True)
class Progress:
    """How far a job has come over all attempts."""

    attempt: int = 0
    """The number of the attempt that runs, or has just ended."""
    best: int | None = None
    fruitless: int = 0
    """How many restarts in a row ended without a step beyond the best."""

    def after(self, outcome: AttemptOutcome) -> Progress:
        if outcome.best is not None and (self.best is None or outcome.best > self.best):
            return Progress(self.attempt, outcome.best, 0)
        return Progress(self.attempt, self.best, self.fruitless + (self.attempt > 0))


@dataclass(frozen=True)
class Verdict:
    """What happens after an attempt."""

    progress: Progress
    exit_code: int | None
    """The exit code of the supervisor; None to start all processes again."""
    text: str
    """The reason, in one line; empty where all went well."""
    pause: float = 0.0
    """Seconds to wait before the restart."""


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """A process that ended by itself, and not as it should."""

    process: int
    pid: int
    host: str
    code: int
    """The exit code, or minus the number of a signal."""
    error: str
    """The exception, or the last line that it printed; empty where nothing is known."""
    step: int | None
    phase: str

    @property
    def is_cause(self) -> bool:
        """False where the process ended only because another one failed."""
        return self.code != OTHER_FAILED

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
            # Who failed only waited for these.
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
    """The process that failed first; None where none failed by itself."""
    best: int | None = None
    all_saved: bool = False
    """True if all ended with a saved state after a preemption."""
    any_saved: bool = False
    fails_for_all: bool = False
    """True if all processes failed by themselves with one error of the program."""
    rejoins: bool = False
    """True if the supervisor has ended it in order to start all processes again."""
    stop_signal: int | None = None
    """The signal that asked the supervisor to stop, if one did."""
    killed: tuple[int, ...] = ()
    """The processes that had not ended by themselves after the grace period, or at a second signal."""


def decide(
    outcome: AttemptOutcome, progress: Progress, max_restarts: int, longest_pause: float = 0.0
) -> Verdict:
    """Returns whether a job is restarted, with the progress of the next attempt."""
    now = progress.after(outcome)
    if outcome.stop_signal is not None:
        return _stopped(outcome, now, outcome.stop_signal)
    failure = outcome.failure
    if failure is None and not outcome.any_saved and not outcome.rejoins:
        return Verdict(now, 0, "")
    why = "all processes have saved after a preemption" if failure is None else str(failure)
    if outcome.rejoins:
        why = "stopped, to start those that had failed again"
    if now.fruitless >= max_restarts:
        code = SAVED if failure is None else failure.exit_code
        return Verdict(now, code, f"{_gave_up(now, max_restarts)}: {why}")
    if outcome.fails_for_all and failure is not None and not now.best:
        same = "not restarted, since every process failed with the same error before the first step"
        return Verdict(now, failure.exit_code, f"{same}: {why}")
    then = Progress(now.attempt + 1, now.best, now.fruitless)
    pause = pause_after(now.fruitless, longest_pause)
    return Verdict(then, None, f"{why}; {_restarting(then, max_restarts, pause)}", pause)


def of_the_program(failures: Sequence[ProcessFailure]) -> bool:
    """Returns whether processes failed with one error that a restart would bring again."""
    first = {re.sub(r"0x\w+|\d+", "", failure.error.partition("\n")[0]) for failure in failures}
    return len(first) == 1 and all(
        failure.code > 0
        and failure.code not in MEANING
        and failure.error
        and not _MAY_PASS.match(failure.error)
        for failure in failures
    )


def pause_after(fruitless: int, longest: float) -> float:
    """Returns the seconds before a restart: none after progress, then 1, 2, 4, … up to the longest."""
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
    far = "its first step" if progress.best is None else f"step {progress.best}"
    beyond = "reached" if progress.best is None else "got beyond"
    return f"gave up, since none of the last {progress.fruitless} restarts {beyond} {far}"


def _restarting(progress: Progress, max_restarts: int, pause: float) -> str:
    when = f" in {pause:g} s" if pause else ""
    return (
        f"stopping the other processes; restarting all{when} (restart {progress.attempt}; "
        f"{progress.fruitless} of {max_restarts} allowed without progress)"
    )


def _listed(details: list[str]) -> str:
    left_out = len(details) - _MOST_DETAILS
    more = [f"and {left_out} more"] if left_out > 0 else []
    return "; ".join([*map(_shortened, details[:_MOST_DETAILS]), *more])


def _shortened(text: str) -> str:
    """Leaves out the middle of a long text: what failed stands first, and what to do last."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
