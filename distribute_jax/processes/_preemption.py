"""Preemption: all processes of a job stop at one common step when one of them is asked to stop."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

import jax

from distribute_jax.processes._job import Job, current_job
from distribute_jax.processes._liveness import announce_failure
from distribute_jax.processes._signals import exit_process, replace_sigterm
from distribute_jax.processes._status import doing

TERMINATED = 143
"""The exit code of a process that SIGTERM ended before it had saved: 128 + 15."""

_POLL_SECONDS = 0.2
_WATCHER_SECONDS = 1.0
_DEAF = (
    "SIGTERM will not be noticed by this loop: the program has its own handler for it, or the loop runs in "
    "another thread than the main one. Leave SIGTERM alone, or pass a termination_watcher_fn."
)
_LOG = logging.getLogger("distribute_jax")
_blocks = itertools.count()


class Preemption:
    """Watches, for a ``with`` block around a loop, for a request to stop.

    The request is SIGTERM to any process, or comes from a function that asks the platform. At each
    boundary between two steps the loop asks :meth:`reached`. Whichever process got it, all stop at the
    same step: process 0 proposes one, each process agrees if it has not come to it yet, and until that is
    decided none goes beyond it. A process that got a request ends in any case after the grace period.

    Args:
        grace_seconds: how long a process that got a request may take.
        termination_watcher_fn: called each second in a separate thread; True means that the end is near.
    """

    def __init__(
        self, grace_seconds: float, termination_watcher_fn: Callable[[], bool] | None = None
    ) -> None:
        self._grace = grace_seconds
        self._watcher = termination_watcher_fn
        self._job = current_job()
        self._folder = f"preempt/{next(_blocks)}/"
        self._changed = threading.Condition()
        self._is_signalled = self._is_over = False
        self.requested_at: float | None = None
        """When this process got a request, on the clock of ``time.monotonic()``."""
        self._deadline: threading.Timer | None = None
        self._step = 0
        self._round = -1
        self._tentative: int | None = None
        self._stop_at: int | None = None
        self._ended = threading.Event()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if not self._exits.enter_context(replace_sigterm(self._on_sigterm)) and not self._watcher:
            _LOG.warning(_DEAF)
        if self._watcher is not None:
            _in_background(self._watch, self._watcher)
        if not self._job.is_alone:
            _in_background(self._agree)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Announces that this process is done.

        A SIGTERM that came too late to stop the loop has its usual effect now.
        """
        if kind is None:
            self._try_put(f"done/{self._job.index}", "")
        with self._changed:
            self._ended.set()
            if self._deadline is not None:
                self._deadline.cancel()
        self._exits.close()
        if kind is None and self._is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Returns whether to save now and exit.

        Args:
            step: how many steps are done; the same on all processes at the same boundary.

        Returns:
            True on all processes at the same boundary, at most once.
        """
        self._step = step
        if self._job.is_alone:
            return self.requested_at is not None
        if self._tentative is None and self._stop_at is None:
            return False
        with self._changed, doing("agreeing on a step to stop at"):
            self._changed.wait_for(
                lambda: self._tentative is None or step < self._tentative or self._ended.is_set()
            )
        return self._stop_at is not None and step >= self._stop_at

    def _on_sigterm(self) -> None:
        self._is_signalled = True
        self._request("SIGTERM")

    def _request(self, reason: str) -> None:
        message = f"{reason}: {self._grace:g} s of grace are over, and nothing was saved since. Not saved."
        with self._changed:
            # A timer that starts when the block has ended would end what the program does next.
            if self.requested_at is not None or self._ended.is_set():
                return
            self._deadline = threading.Timer(self._grace, self._expire, args=(message,))
            self._deadline.daemon = True
            self._deadline.start()
            self.requested_at = time.monotonic()
        _LOG.warning("%s: this process stops at the next step it can save.", reason)
        self._try_put(f"requested/{self._job.index}", reason)

    def _expire(self, message: str) -> None:
        with self._changed:  # which the block takes to end
            if not self._ended.is_set():
                exit_unsaved(self._job, message)

    def _watch(self, watcher: Callable[[], bool]) -> None:
        while not self._ended.wait(_WATCHER_SECONDS):
            if watcher():
                self._request("termination_watcher_fn")
                return

    # The agreement; everything below runs in the thread.

    def _agree(self) -> None:
        with contextlib.suppress(
            jax.errors.JaxRuntimeError
        ):  # process 0 is gone, and the job with it
            while not self._ended.wait(_POLL_SECONDS) and not self._is_over:
                self._poll()
        with self._changed:
            self._tentative = None if self._stop_at is None else self._tentative
            self._changed.notify_all()

    def _poll(self) -> None:
        entries = self._job.store.under(self._folder)
        if not any(key.startswith("requested/") for key in entries):
            return
        if any(key.startswith("done/") for key in entries):
            self._decide(None, is_over=True)
            return
        if f"at/{self._job.index}" not in entries:
            self._put(f"at/{self._job.index}", str(self._step))
        if self._job.index == 0:
            self._propose(entries)
        if "proposal" in entries:
            self._answer(*json.loads(entries["proposal"]))
        if f"decision/{self._round}" in entries:
            is_stop = entries[f"decision/{self._round}"] == "stop"
            self._decide(self._tentative if is_stop else None, is_over=is_stop)

    def _propose(self, entries: dict[str, str]) -> None:
        """Proposes a step as process 0, and decides once all have answered."""
        processes = range(self._job.count)
        steps = [int(entries[f"at/{i}"]) for i in processes if f"at/{i}" in entries]
        if len(steps) < self._job.count:
            return
        number, _ = json.loads(entries.get("proposal", "[-1, 0]"))
        if number >= 0:
            answers = [entries.get(f"answer/{number}/{i}") for i in processes]
            if None in answers:
                return
            is_stop = all(answer == "yes" for answer in answers)
            self._put(f"decision/{number}", "stop" if is_stop else "again")
            if is_stop:
                return
        # Far enough ahead that all hear of it before they come there; twice as far each time.
        ahead = max(self._step, *steps) + 2 ** (number + 2)
        self._put("proposal", json.dumps([number + 1, ahead]))

    def _answer(self, number: int, step: int) -> None:
        if number == self._round:
            return
        with self._changed:
            self._round = number
            is_ahead = self._step < step
            self._tentative = step if is_ahead else None
        self._put(f"answer/{number}/{self._job.index}", "yes" if is_ahead else "no")

    def _decide(self, stop_at: int | None, *, is_over: bool) -> None:
        with self._changed:
            self._stop_at, self._tentative, self._is_over = stop_at, None, is_over
            self._changed.notify_all()

    def _put(self, key: str, text: str) -> None:
        self._job.store.put(f"{self._folder}{key}", text)

    def _try_put(self, key: str, text: str) -> None:
        if not self._job.is_alone:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._put(key, text)


def _in_background(work: Callable[..., None], *args: object) -> None:
    thread = threading.Thread(target=work, args=args, name="distribute_jax preemption", daemon=True)
    thread.start()


def exit_unsaved(job: Job, message: str) -> None:
    """Ends a process that was asked to stop and has nothing to save, or no time left to."""
    if job.is_alone:
        sys.stderr.write(f"distribute_jax: {message}\n")
        sys.stderr.flush()
        os._exit(TERMINATED)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        announce_failure(job, message)
    exit_process(job, TERMINATED, message)
