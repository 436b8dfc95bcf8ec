"""Handles SIGTERM, records the exit code that the program requests, and exits without clean-up.

Python runs signal handlers between two bytecodes of the main thread, which may be blocked in C by another
process. So a thread is notified of SIGTERM through the wake-up descriptor of Python's C handler.

``atexit`` functions do not see the exit code. So ``sys.exit`` raises a subclass of ``SystemExit``, which
records its code when it is freed outside of all frames: after the last frame and before ``atexit``. One
that was caught is freed inside a frame, and records nothing. ``raise SystemExit(5)`` is not noticed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from distribute_jax.processes._job import Job
from distribute_jax.processes._status import status_writer

Action = Callable[[], None]
"""Called in a separate thread when the process gets SIGTERM."""

_EXITED = "exited/"
_LINGER_SECONDS = 2.5
_POLL_SECONDS = 0.05

_actions: list[Action] = []
_action_lock = threading.RLock()
_stop_listening: Action | None = None
_exit_codes: list[object] = []


def on_sigterm(action: Action) -> None:
    """Sets the action for SIGTERM outside of all blocks of ``replace_sigterm``.

    Nothing happens if the user has a handler, or in a thread other than the main one.
    """
    _actions.insert(0, action)
    _start_listening()


@contextlib.contextmanager
def replace_sigterm(action: Action) -> Iterator[bool]:
    """Replaces the action for SIGTERM in a ``with`` block; yields whether it will be called."""
    _actions.append(action)
    _start_listening()
    try:
        yield _stop_listening is not None
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and _stop_listening is not None and len(_actions) == 1:
            _stop_listening()  # before the action is removed: a signal may be pending
        with _action_lock:
            _actions.remove(action)


def _start_listening() -> None:
    global _stop_listening
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    is_default = before in (signal.SIG_DFL, signal.SIG_IGN)
    if _stop_listening is not None or not is_main or not is_default:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if old != -1:  # an event loop's, which wakes the main thread itself
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGTERM, lambda *_: _call_action())
    thread = threading.Thread(
        target=_listen, args=(reader,), name="distribute_jax SIGTERM", daemon=True
    )
    thread.start()

    def stop() -> None:
        global _stop_listening
        signal.signal(signal.SIGTERM, before)
        if old == -1:
            signal.set_wakeup_fd(-1)
        os.close(writer)
        thread.join()
        _stop_listening = None

    _stop_listening = stop


def _after_fork() -> None:
    """Restores SIGTERM in a forked child, which shares the pipe with its parent."""
    if _stop_listening is not None:
        _stop_listening()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _listen(reader: int) -> None:
    with open(reader, "rb", buffering=0) as pipe:
        while numbers := pipe.read(1):
            if numbers[0] == signal.SIGTERM:
                _call_action()


def _call_action() -> None:
    with _action_lock:  # a block that is about to end waits for it
        if _actions:
            _actions[-1]()


class _Exit(SystemExit):
    """What ``sys.exit`` raises in a process of a job."""

    def __del__(self) -> None:
        frame = inspect.currentframe()
        is_outermost = frame is not None and frame.f_back is None
        if is_outermost and threading.current_thread() is threading.main_thread():
            _exit_codes[:] = [self.code]


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__


def _exit(status: object = None, /) -> NoReturn:
    is_main = threading.current_thread() is threading.main_thread()
    raise (_Exit if is_main else SystemExit)(status)  # of another thread Python prints a subclass


def record_exit_code() -> None:
    """Makes ``sys.exit`` record its code."""
    sys.exit = _exit


def requested_exit() -> tuple[int, str]:
    """Returns the exit code that the program has requested, by default 0, and the text of that call."""
    if not _exit_codes or _exit_codes[0] is None:
        return 0, ""
    code = _exit_codes[0]
    if isinstance(code, int):
        return code & 0xFF, f"sys.exit({int(code)})"
    return 1, f"sys.exit({str(code)!r:.300})"


def say(message: str) -> None:
    """Writes a line to standard error, which may be closed, None or on a full disk."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"distribute_jax: {message}\n")
        sys.stderr.flush()


def flush_output() -> None:
    """Flushes standard output, which may be closed or None."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()


def exit_process(job: Job, code: int, message: str = "") -> NoReturn:
    """Ends the process at once, with a message on standard error.

    There is no clean-up, which could hang too. Process 0 runs the coordination service, without which JAX
    aborts the others from C++; so it waits a moment for them to exit by themselves.
    """
    if message:
        status_writer().error(message)
        say(message)
    flush_output()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        job.store.put(f"{_EXITED}{job.index}", str(code))
        deadline = time.monotonic() + (0 if job.index else _LINGER_SECONDS)
        while time.monotonic() < deadline and len(job.store.under(_EXITED)) < job.count:
            time.sleep(_POLL_SECONDS)
    os._exit(code)
