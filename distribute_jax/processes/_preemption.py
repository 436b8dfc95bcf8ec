"""All processes of a job stop at one common step when one of them is told to end."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import jax

from distribute_jax.processes._job import Job, job
from distribute_jax.processes._liveness import note_failed
from distribute_jax.processes._signals import instead, leave
from distribute_jax.processes._status import doing

TERMINATED = 143
"""The exit code of a process that SIGTERM ended before it had saved: 128 + 15."""

_LOOK_SECONDS = 0.2
_ASK_SECONDS = 1.0
_DEAF = (
    "SIGTERM will not be noticed by this loop: the program has a handler of its own for it, or the loop runs "
    "in another thread than the main one. Leave SIGTERM alone, or pass a termination_watcher_fn."
)
_LOG = logging.getLogger("distribute_jax")
_blocks = itertools.count()


class Preemption:
    """Watches, for a ``with`` block around a loop, for the wish to end it.

    The wish comes as SIGTERM to any process, or from a function that asks the platform. At each boundary
    between two steps the loop asks :meth:`reached`. Whichever process was told, all stop at the same step:
    process 0 proposes one, each process agrees that it has not come to it yet, and until that is decided
    none goes beyond it. Whoever was told ends in any case once the grace period is over.

    Args:
        grace_seconds: how long a process that was told to end may take.
        termination_watcher_fn: asked each second in a thread of its own; True means that the end is near.
    """

    def __init__(
        self, grace_seconds: float, termination_watcher_fn: Callable[[], bool] | None = None
    ) -> None:
        self._grace = grace_seconds
        self._watcher = termination_watcher_fn
        self._job = job()
        self._folder = f"preempt/{next(_blocks)}/"
        self._changed = threading.Condition()
        self._is_noticed = self._is_signalled = self._is_over = False
        self._deadline: threading.Timer | None = None
        self._step = 0
        self._round = -1
        self._tentative: int | None = None
        self._stop_at: int | None = None
        self._ended = threading.Event()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begins to watch."""
        if not self._exits.enter_context(instead(self._signalled)) and self._watcher is None:
            _LOG.warning(_DEAF)
        if self._watcher is not None:
            _in_background(self._ask, self._watcher)
        if self._job is not None:
            _in_background(self._agree, self._job)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Watches no longer; who still waits for a decision is told that this process is done.

        Where the loop came to its end before the process that was told to end could stop it, the signal
        has its usual effect now.
        """
        if self._job is not None and kind is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._put(self._job, f"done/{self._job.index}", "")
        self._ended.set()
        if self._deadline is not None:
            self._deadline.cancel()
        self._exits.close()
        if kind is None and self._is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Tells whether to save now and leave.

        Args:
            step: how many steps are done; the same on all processes at the same boundary.

        Returns:
            True on all processes at the same boundary, at most once.
        """
        self._step = step
        if self._job is None:
            return self._is_noticed
        if self._tentative is None and self._stop_at is None:
            return False
        with self._changed, doing("agreeing on a step to stop at"):
            self._changed.wait_for(
                lambda: self._tentative is None or step < self._tentative or self._ended.is_set()
            )
        return self._stop_at is not None and step >= self._stop_at

    def _signalled(self) -> None:
        self._is_signalled = True
        self._notice("SIGTERM")

    def _notice(self, reason: str) -> None:
        """Takes the wish to end: from a signal, or from the platform."""
        if self._is_noticed:
            return
        self._is_noticed = True
        _LOG.warning("This process is to end (%s); it stops at the next step it can save.", reason)
        if self._job is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._put(self._job, f"noticed/{self._job.index}", reason)
        self._deadline = threading.Timer(self._grace, self._too_late, args=(reason,))
        self._deadline.daemon = True
        self._deadline.start()

    def _too_late(self, reason: str) -> None:
        words = f"{reason}: {self._grace:g} s of grace are over, and nothing was saved since. Not saved."
        end_told(self._job, words)

    def _ask(self, watcher: Callable[[], bool]) -> None:
        while not self._ended.wait(_ASK_SECONDS):
            if watcher():
                self._notice("termination_watcher_fn")
                return

    # The agreement; everything below runs in the thread.

    def _agree(self, found: Job) -> None:
        try:
            while not self._ended.wait(_LOOK_SECONDS) and not self._is_over:
                self._look(found)
        except jax.errors.JaxRuntimeError:
            pass  # process 0 is gone, and the job with it
        with self._changed:
            self._tentative = None if self._stop_at is None else self._tentative
            self._changed.notify_all()

    def _look(self, found: Job) -> None:
        said = found.store.under(self._folder)
        if not any(key.startswith("noticed/") for key in said):
            return
        if any(key.startswith("done/") for key in said):
            self._decide(None, is_over=True)
            return
        if f"at/{found.index}" not in said:
            self._put(found, f"at/{found.index}", str(self._step))
        if found.index == 0:
            self._propose(found, said)
        if "proposal" in said:
            self._answer(found, *json.loads(said["proposal"]))
        if f"decision/{self._round}" in said:
            is_stop = said[f"decision/{self._round}"] == "stop"
            self._decide(self._tentative if is_stop else None, is_over=is_stop)

    def _propose(self, found: Job, said: dict[str, str]) -> None:
        """Proposes a step as process 0, and decides once all have answered."""
        at = [said.get(f"at/{i}") for i in range(found.count)]
        if any(step is None for step in at):
            return
        number, _ = json.loads(said.get("proposal", "[-1, 0]"))
        answers = [said.get(f"answer/{number}/{i}") for i in range(found.count)]
        if number >= 0 and any(answer is None for answer in answers):
            return
        if number >= 0 and all(answer == "yes" for answer in answers):
            self._put(found, f"decision/{number}", "stop")
            return
        if number >= 0:
            self._put(found, f"decision/{number}", "again")
        # Far enough ahead that all hear of it before they come there; twice as far each time.
        steps = [int(step) for step in at if step is not None]
        ahead = max(self._step, *steps) + 2 ** (number + 2)
        self._put(found, "proposal", json.dumps([number + 1, ahead]))

    def _answer(self, found: Job, number: int, step: int) -> None:
        if number == self._round:
            return
        with self._changed:
            self._round = number
            is_ahead = self._step < step
            self._tentative = step if is_ahead else None
        self._put(found, f"answer/{number}/{found.index}", "yes" if is_ahead else "no")

    def _decide(self, stop_at: int | None, *, is_over: bool) -> None:
        with self._changed:
            self._stop_at, self._tentative, self._is_over = stop_at, None, is_over
            self._changed.notify_all()

    def _put(self, found: Job, key: str, text: str) -> None:
        found.store.put(f"{self._folder}{key}", text)


def _in_background(work: Callable[..., None], *args: object) -> None:
    thread = threading.Thread(target=work, args=args, name="distribute_jax preemption", daemon=True)
    thread.start()


def end_told(found: Job | None, words: str) -> None:
    """Ends a process that was told to end and has nothing to save, or no time left to."""
    if found is None:
        sys.stderr.write(f"distribute_jax: {words}\n")
        sys.stderr.flush()
        os._exit(TERMINATED)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        note_failed(found, words)
    leave(found, TERMINATED, words)
