"""What happens after an attempt: a pure function of how it ended on every machine.

Each supervisor computes it for itself from the same data, so that all come to the same result.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distribute_jax.processes._status import MEANING, OTHER_FAILED, SAVED


@dataclass(frozen=True)
class Progress:
    """How far a job has come over all attempts."""

    attempt: int = 0
    """The number of the attempt that runs, or has just ended."""
    best: int | None = None
    """The highest step that was ever reached."""
    fruitless: int = 0
    """How many restarts in a row ended without a step beyond the best."""

    def after(self, outcomes: Sequence[Outcome]) -> Progress:
        """Gives the progress with what the last attempt has added."""
        reached = max((o.best for o in outcomes if o.best is not None), default=None)
        if reached is not None and (self.best is None or reached > self.best):
            return Progress(self.attempt, reached, 0)
        return Progress(self.attempt, self.best, self.fruitless + (self.attempt > 0))


@dataclass(frozen=True)
class Verdict:
    """What happens now."""

    progress: Progress
    exit_code: int | None
    """With what the supervisor ends; None where all processes are started again."""
    text: str
    """The line that says why; empty where all went well."""
    pause: float = 0.0
    """Seconds to wait before that."""


def decide(
    outcomes: Sequence[Outcome], progress: Progress, max_restarts: int, longest_pause: float = 0.0
) -> Verdict:
    """Says whether a job is started again.

    Args:
        outcomes: how the attempt ended, for each machine.
        progress: how far the job had come before it.
        max_restarts: how many restarts in a row may bring nothing; 0 for no restart at all.
        longest_pause: how many seconds a pause before a restart lasts at most.

    Returns:
        The verdict, with the progress of the next attempt.
    """
    now = progress.after(outcomes)
    told = next((o.told for o in outcomes if o.told is not None), None)
    if told is not None:
        return _left(outcomes, now, told)
    death = cause_of(outcomes)
    saved = any(o.any_saved for o in outcomes)
    if death is None and not saved:
        return Verdict(now, 0, "")
    why = "all processes have saved after a preemption" if death is None else str(death)
    if now.fruitless >= max_restarts:
        code = SAVED if death is None else death.exit_code
        return Verdict(now, code, f"{_gave_up(now, max_restarts)}: {why}")
    then = Progress(now.attempt + 1, now.best, now.fruitless)
    pause = pause_after(now.fruitless, longest_pause)
    return Verdict(then, None, f"{why}; {_again(then, max_restarts, pause)}", pause)


def pause_after(fruitless: int, longest: float) -> float:
    """Gives the seconds before a restart: none after progress, then 1, 2, 4, … up to the longest."""
    return min(float(2 ** min(fruitless - 1, 60)), longest) if fruitless else 0.0


def cause_of(outcomes: Sequence[Outcome]) -> Death | None:
    """Gives the process that failed first, rather than one that ended because another did."""
    deaths = [outcome.death for outcome in outcomes if outcome.death is not None]
    return next((death for death in deaths if death.is_cause), deaths[0] if deaths else None)


def _left(outcomes: Sequence[Outcome], progress: Progress, told: int) -> Verdict:
    all_saved = all(outcome.all_saved for outcome in outcomes)
    state = "all processes have saved and ended" if all_saved else "all processes have ended"
    killed = [process for outcome in outcomes for process in outcome.killed]
    if killed:
        some = ", ".join(f"{process}" for process in killed[:16])
        state = f"killed, since they had not ended after the grace: process {some}"
    text = f"told to end by {signal_name(told)}: {state}"
    return Verdict(progress, SAVED if all_saved else 128 + told, text)


def _gave_up(progress: Progress, max_restarts: int) -> str:
    if not max_restarts:
        return "not started again (--max-restarts 0)"
    far = "its first step" if progress.best is None else f"step {progress.best}"
    beyond = "reached" if progress.best is None else "got beyond"
    return f"gave up, since none of the last {progress.fruitless} restarts {beyond} {far}"


def _again(progress: Progress, max_restarts: int, pause: float) -> str:
    spent = f", {progress.fruitless} of {max_restarts} without progress"
    when = f" in {pause:g} s" if pause else ""
    return f"the others are ended, and all start again{when} (restart {progress.attempt}{spent})"


_LONGEST = 400


@dataclass(frozen=True, kw_only=True)
class Death:
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
        """Whether it ended for a reason of its own, and not because of another process."""
        return self.code != OTHER_FAILED

    @property
    def exit_code(self) -> int:
        """What a shell shows for it."""
        return self.code if self.code > 0 else 128 - self.code

    def __str__(self) -> str:
        """Says which process, how it ended, and where it was."""
        where = "before it reported a step" if self.step is None else f"at step {self.step}"
        phase = f", {self.phase}" if self.phase else ""
        return (
            f"process {self.process} (pid {self.pid} on {self.host}) {self._how()} {where}{phase}"
        )

    def _how(self) -> str:
        if self.code == -signal.SIGABRT and self.error:
            return f"was ended by {signal_name(-self.code)} ({_shortened(self.error)})"
        if self.code < 0:
            return f"was ended by {signal_name(-self.code)}"
        if self.code in MEANING:
            cause = self.code == OTHER_FAILED and self.error
            why = f": {_shortened(self.error)}" if cause else ""
            return f"{MEANING[self.code]}{why} (exit code {self.code})"
        error = f" with {_shortened(self.error)}" if self.error else ""
        return f"failed{error} (exit code {self.code})"


def _shortened(text: str) -> str:
    """Leaves out the middle of a long text: what failed stands first, and what to do last."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def signal_name(number: int) -> str:
    """Gives the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended on one machine."""

    death: Death | None = None
    """The process that failed first here; None where none failed by itself."""
    best: int | None = None
    """The highest step that a process here has reached."""
    all_saved: bool = False
    """Whether all ended with a saved state after a preemption."""
    any_saved: bool = False
    """Whether one did."""
    told: int | None = None
    """The signal by which this supervisor was told to end."""
    killed: tuple[int, ...] = ()
    """The processes that had not ended by themselves after the grace."""

    def as_data(self) -> dict[str, Any]:
        """Gives it as JSON has it."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Outcome:
        """Reads what ``as_data`` gave."""
        death = data["death"]
        read = {"death": None if death is None else Death(**death), "killed": tuple(data["killed"])}
        return Outcome(**{**data, **read})
