"""Interrupts, such as that of Ctrl-C, wait while a step takes the old state and the new one is not stored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_NAMES = ("INT", "TERM", "HUP", "QUIT", "BREAK", "ALRM", "VTALRM", "PROF", "USR1", "USR2")
_SIGNALS = [getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}")]


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Lets signals that Python code handles wait until the block ends; the second of a kind does not.

    Python runs their handlers between any two instructions of the main thread, and what a handler raises
    takes away what a call has just returned. To block the signals themselves would not help: the kernel
    then delivers them to another thread, and Python handles them in the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {s: h for s in _SIGNALS if callable(h := signal.getsignal(s))}
    came: list[int] = []

    def hold_back(number: int, frame: Any) -> None:
        if number in came:
            handler: Any = handlers[signal.Signals(number)]
            handler(number, frame)
        else:
            came.append(number)

    with ExitStack() as again:
        try:
            for number in handlers:
                signal.signal(number, hold_back)
            yield
        finally:
            _set_handlers(handlers)
            for number in came:
                again.callback(signal.raise_signal, number)


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    """Sets all, also where one of those that are set already is called meanwhile and raises."""
    left, interrupt = list(handlers), None
    while left:
        try:
            # Not a `while`, whose jump back Python 3.13 leaves out of the block that `try` protects.
            for number in tuple(left):
                signal.signal(number, handlers[number])
                left.remove(number)
        except BaseException as raised:
            interrupt = raised
    if interrupt is not None:
        raise interrupt
