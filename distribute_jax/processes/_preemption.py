"""Preemption: when one process of a job is asked to stop, all agree on a common step at which they stop."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Self

import jax

from distribute_jax._messages import error_line
from distribute_jax.processes._job import Job, current_job
from distribute_jax.processes._liveness import announce_failure
from distribute_jax.processes._signals import exit_process, replace_sigterm, say
from distribute_jax.processes._status import doing

TERMINATED = 143
"""The exit code of a process that SIGTERM ended before it had saved: 128 + 15."""

_POLL_SECONDS = 0.2
_WATCHER_SECONDS = 1.0
_SIGTERM = "SIGTERM"
_SIGTERM_UNNOTICED = (
    "SIGTERM will not be noticed by this loop: the program has installed another handler, or the loop does "
    "not run in the main thread. Do not handle SIGTERM yourself, or pass a termination_watcher_fn."
)
_LOG = logging.getLogger("distribute_jax")
_blocks = itertools.count()


class Preemption:
    """Watches for a request to stop during a ``with`` block around a loop.

    A request is SIGTERM to any process, or a watcher function that returns True. The loop calls
    :meth:`reached` between two steps. After a request each process publishes its step, and waits at its next
    boundary until all have; all stop at the first boundary that none has passed. A process that got a request
    exits in any case when its grace period ends; that of the watcher's requests may be a different one.
    """

    def __init__(
        self,
        grace_seconds: float,
        termination_watcher_fn: Callable[[], bool] | None = None,
        watcher_grace_seconds: float | None = None,
    ) -> None:
        self._grace = grace_seconds
        self._watcher = termination_watcher_fn
        self._watcher_grace = watcher_grace_seconds or grace_seconds
        self._job = current_job()
        self._folder = f"preempt/{next(_blocks)}/"
        self._changed = threading.Condition()
        self._is_signalled = False
        self.requested_at: float | None = None
        """When this process got a request, by ``time.monotonic()``."""
        self.by_sigterm = False
        """True if a process got SIGTERM; the same on all processes once the step is reached."""
        self._deadline: threading.Timer | None = None
        self._step = 0
        self._is_waiting = False
        """True if the loop has to wait at its next boundary until the common step is known."""
        self._stop_at: int | None = None
        self._ended = threading.Event()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if not self._exits.enter_context(replace_sigterm(self._on_sigterm)) and not self._watcher:
            _LOG.warning(_SIGTERM_UNNOTICED)
        if self._watcher is not None:
            _in_background(self._watch, self._watcher)
        if not self._job.is_alone:
            _in_background(self._agree)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Announces that this loop has ended; a SIGTERM that was too late for it has its usual effect now."""
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
        """True if it is time to save and exit: on all processes after the same step, at most once."""
        self._step = step
        if self._job.is_alone:
            self.by_sigterm = self._is_signalled
            return self.requested_at is not None
        if self._is_waiting:
            with self._changed, doing("agreeing on a step to stop at"):
                self._changed.wait_for(lambda: not self._is_waiting or self._ended.is_set())
        return self._stop_at is not None and step >= self._stop_at

    def _on_sigterm(self) -> None:
        self._is_signalled = True
        self._request(_SIGTERM, self._grace)

    def _request(self, reason: str, grace: float) -> None:
        message = f"{reason}: the grace period of {grace:g} s is over, and nothing was saved in it."
        with self._changed:
            # A timer that starts after the block would end the program later.
            if self.requested_at is not None or self._ended.is_set():
                return
            self._deadline = threading.Timer(grace, self._expire, args=(message,))
            self._deadline.daemon = True
            self._deadline.start()
            self.requested_at = time.monotonic()
        _LOG.warning("%s: this process stops at the next step that it can save.", reason)
        self._try_put(f"requested/{self._job.index}", reason)

    def _expire(self, message: str) -> None:
        with self._changed:  # against `__exit__`
            if not self._ended.is_set():
                exit_unsaved(self._job, message)

    def _watch(self, watcher: Callable[[], bool]) -> None:
        has_warned = False
        while not self._ended.wait(_WATCHER_SECONDS):
            try:
                is_requested = watcher()
            except Exception as error:  # it may answer at the next poll
                if not has_warned:
                    text = error_line(error)
                    _LOG.warning("A request to stop is not noticed at present: %s", text)
                has_warned, is_requested = True, False
            if is_requested:
                self._request("termination_watcher_fn", self._watcher_grace)
                return

    def _agree(self) -> None:
        """Agrees with the other processes on a step once one of them got a request; runs in a thread."""
        # Without process 0 the job cannot continue, and the watchdog ends it.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while not self._ended.wait(_POLL_SECONDS) and not self._is_decided():
                pass
        with self._changed:
            self._is_waiting = False
            self._changed.notify_all()

    def _is_decided(self) -> bool:
        """Publishes the step of this process after a request; True if nothing is left to agree on."""
        entries = self._job.store.under(self._folder)
        reasons = [text for key, text in entries.items() if key.startswith("requested/")]
        if reasons and not self._is_waiting:
            self._is_waiting = True  # first, so that the loop cannot pass another boundary
            self._put(f"at/{self._job.index}", json.dumps([self._step, _SIGTERM in reasons]))
        positions = [json.loads(text) for key, text in entries.items() if key.startswith("at/")]
        if len(positions) == self._job.count:
            # From these and not the requests, of which processes may have seen different ones.
            self.by_sigterm = any(saw_sigterm for _, saw_sigterm in positions)
            self._stop_at = max(step for step, _ in positions) + 1
            return True
        return any(key.startswith("done/") for key in entries)  # its loop has ended

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
    """Ends a process that was asked to stop, and has nothing to save or no time left for it."""
    if job.is_alone:
        say(message)
        os._exit(TERMINATED)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        announce_failure(job, message)
    exit_process(job, TERMINATED, message)
