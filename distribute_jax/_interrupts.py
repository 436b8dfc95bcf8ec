"""Delays signals such as Ctrl-C while a step has donated the old state and the new one is not stored yet."""

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
    """Delays signals with Python handlers until the block ends; a second signal of a kind is not delayed.

    Python runs handlers between any two bytecodes of the main thread, and an exception of a handler discards
    what a call has just returned. Blocking the signals would not help: the kernel then delivers them to
    another thread, and Python still runs the handlers in the main thread.
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
    """Sets all handlers, even if one that is already set runs meanwhile and raises."""
    left, interrupt = list(handlers), None
    while left:
        try:
            # Not a `while`: Python 3.13 does not protect its jump back by the `try`.
            for number in tuple(left):
                signal.signal(number, handlers[number])
                left.remove(number)
        except BaseException as raised:
            interrupt = raised
    if interrupt is not None:
        raise interrupt
