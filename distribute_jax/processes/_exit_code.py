"""With which code a program has asked to end, which Python tells nobody: it reaches no hook.

Python's ``SystemExit`` is freed when nothing catches it, after the last frame and before the functions of
``atexit``. So ``sys.exit`` raises one that says then with which code it ended the program; one that somebody
caught is freed inside a frame, and says nothing. Who writes ``raise SystemExit(5)`` is not seen.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import NoReturn

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


def listen() -> None:
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
