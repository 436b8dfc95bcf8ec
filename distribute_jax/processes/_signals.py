"""How a process ends: SIGTERM handling, the requested exit code, and exit without clean-up.

Python runs signal handlers between two lines of the main thread, which may wait in C for another process
for ever. So a separate thread is notified of SIGTERM, through the descriptor that Python's handler in C
writes to.

Python's ``SystemExit`` is freed when nothing catches it, after the last frame and before the functions of
``atexit``. So ``sys.exit`` raises a subclass that then records the code with which it ended the program; one
that was caught is freed inside a frame, and records nothing. ``raise SystemExit(5)`` is not seen.
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
_acting = threading.RLock()
_stop_listening: Action | None = None
_exit_codes: list[object] = []


def on_sigterm(action: Action) -> None:
    """Sets the action for SIGTERM, while no block of ``replace_sigterm`` is active.

    Nothing happens where the user has a handler, or in a thread other than the main one.
    """
    _actions.insert(0, action)
    if _stop_listening is None and _can_listen():
        _start()


@contextlib.contextmanager
def replace_sigterm(action: Action) -> Iterator[bool]:
    """Replaces the action for SIGTERM in a ``with`` block; yields whether it will be called."""
    _actions.append(action)
    if _stop_listening is None and _can_listen():
        _start()
    try:
        yield _stop_listening is not None
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and _stop_listening is not None and len(_actions) == 1:
            _stop_listening()  # while the action is there for a signal that has come
        with _acting:
            _actions.remove(action)


def _can_listen() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN)


def _start() -> None:
    """Starts to listen."""
    global _stop_listening
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if old != -1:  # an event loop has it; it wakes the main thread itself
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGTERM, lambda *_: _act())
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
    """Sets SIGTERM back to its usual effect in a forked child, which shares the pipe with this process."""
    if _stop_listening is not None:
        _stop_listening()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _listen(reader: int) -> None:
    with open(reader, "rb", buffering=0) as pipe:
        while numbers := pipe.read(1):
            if numbers[0] == signal.SIGTERM:
                _act()


def _act() -> None:
    with _acting:  # a block that ends meanwhile waits, and sees the signal
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
    raise _Exit(status)


def record_exit_code() -> None:
    """Records from now on with which code ``sys.exit`` ends the program."""
    sys.exit = _exit


def requested_exit() -> tuple[int, str]:
    """Returns the exit code that the program has requested, 0 without one, and the call that did."""
    if not _exit_codes or _exit_codes[0] is None:
        return 0, ""
    code = _exit_codes[0]
    if isinstance(code, int):
        return code & 0xFF, f"sys.exit({int(code)})"
    return 1, f"sys.exit({str(code)!r:.300})"


def say(message: str) -> None:
    """Writes a line to standard error; one that nobody reads any more, or a full disk, does not matter."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"distribute_jax: {message}\n")
        sys.stderr.flush()


def exit_process(job: Job, code: int, message: str = "") -> NoReturn:
    """Ends the process at once, with a message on its standard error.

    Nothing is cleaned up: what hangs would hang the clean-up too. Process 0 keeps the coordination
    service, without which JAX ends the others from C++; so it gives them a moment to exit by themselves.
    """
    if message:
        status_writer().error(message)
        say(message)
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        sys.stdout.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        job.store.put(f"{_EXITED}{job.index}", str(code))
        deadline = time.monotonic() + (0 if job.index else _LINGER_SECONDS)
        while time.monotonic() < deadline and len(job.store.under(_EXITED)) < job.count:
            time.sleep(_POLL_SECONDS)
    os._exit(code)
