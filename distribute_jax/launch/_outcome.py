"""How an attempt ended on one machine, in words and as data that goes to the other machines."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import Any

from distribute_jax.cluster._exit_codes import MEANING, OTHER_FAILED

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
