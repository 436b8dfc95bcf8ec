"""How a process ends: SIGTERM handling, the exit code that was asked for, and ending at once.

Python runs signal handlers between two lines of the main thread, which may wait in C for another process
for ever. So a separate thread is notified of SIGTERM, through the descriptor that Python's handler in C
writes to.

Python's ``SystemExit`` is freed when nothing catches it, after the last frame and before the functions of
``atexit``. So ``sys.exit`` raises a subclass that records then with which code it ended the program; one
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
from distribute_jax.processes._status import own_status

Action = Callable[[], None]
"""What is to happen, in a thread of its own."""

_actions: list[Action] = []
_listening: list[bool] = []


def listen(action: Action) -> bool:
    """Has an action done when the process is told to end, as long as no other is put over it.

    Returns:
        Whether it will be: a handler of the user's own stays, and other threads than the main one cannot
        install any.
    """
    _actions.insert(0, action)
    if not _listening and _can_listen():
        _start()
    return bool(_listening)


@contextlib.contextmanager
def instead(action: Action) -> Iterator[bool]:
    """For a ``with`` block, has another action done; gives whether it will be."""
    _actions.append(action)
    before = None
    if not _listening and _can_listen():
        before = _start()
    try:
        yield bool(_listening)
    finally:
        _actions.remove(action)
        if before is not None and not _actions:
            before()


def _can_listen() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN)


def _start() -> Action:
    """Begins to listen, and gives what ends it."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    old = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    if old != -1:  # an event loop has it; it wakes the main thread itself
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGTERM, lambda *_: _act())
    thread = threading.Thread(
        target=_hear, args=(heard,), name="distribute_jax SIGTERM", daemon=True
    )
    thread.start()
    _listening.append(True)

    def stop() -> None:
        signal.signal(signal.SIGTERM, before)
        if old == -1:
            signal.set_wakeup_fd(-1)
        os.close(told)
        thread.join()
        _listening.clear()

    return stop


def _hear(heard: int) -> None:
    with open(heard, "rb", buffering=0) as pipe:
        while numbers := pipe.read(1):
            if numbers[0] == signal.SIGTERM:
                _act()


def _act() -> None:
    if _actions:
        _actions[-1]()


_asked: list[object] = []


class _Exit(SystemExit):
    """What ``sys.exit`` raises in a process of a job."""

    def __del__(self) -> None:
        frame = inspect.currentframe()
        is_outermost = frame is not None and frame.f_back is None
        if is_outermost and threading.current_thread() is threading.main_thread():
            _asked[:] = [self.code]


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)


def listen_for_exit_code() -> None:
    """From now on ``sys.exit`` is seen."""
    sys.exit = _exit


def asked() -> tuple[int, str]:
    """Gives the exit code that the program has asked for, 0 where it has not, and how it said it."""
    if not _asked or _asked[0] is None:
        return 0, ""
    code = _asked[0]
    if isinstance(code, int):
        return code & 0xFF, f"sys.exit({int(code)})"
    return 1, f"sys.exit({str(code)!r:.300})"


_GONE = "gone/"
_LINGER_SECONDS = 2.5
_LOOK_SECONDS = 0.05


def leave(job: Job, code: int, words: str = "") -> NoReturn:
    """Ends the process, with last words on its standard error.

    Nothing is cleaned up: what hangs would hang the cleaning up too. Process 0 keeps the coordination
    service, without which JAX ends the others from C++; so it gives them a moment to leave by themselves.
    """
    if words:
        own_status().error(words)
        sys.stderr.write(f"distribute_jax: {words}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        job.store.put(f"{_GONE}{job.index}", str(code))
        if job.index == 0:
            _let_others_leave(job)
    os._exit(code)


def _let_others_leave(job: Job) -> None:
    deadline = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < deadline and len(job.store.under(_GONE)) < job.count:
        time.sleep(_LOOK_SECONDS)
