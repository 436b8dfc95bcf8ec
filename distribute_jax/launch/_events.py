"""What a supervisor waits for: its processes, signals, and the supervisors of other machines."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from distribute_jax.launch._child import Child

_FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone
}


@dataclass(frozen=True)
class Told:
    """This supervisor was told to end."""

    number: int
    """The signal to pass on."""


@dataclass(frozen=True)
class PeerFailed:
    """A process on another machine has failed."""

    attempt: int


@dataclass(frozen=True)
class PeerLost:
    """The supervisor of another machine is gone."""

    text: str


Event = Child | Told | PeerFailed | PeerLost


class Inbox:
    """Takes events from threads and signal handlers; one thread reads them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.told: int | None = None
        """The first signal that asked for an end."""

    def put(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Told) and self.told is None:
            self.told = event.number
        self._events.put(event)

    def get(self, seconds: float) -> Event | None:
        """Gives the next event; None where there is none within the time."""
        try:
            return self._events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def pause(self, seconds: float) -> None:
        """Waits between two attempts; not for a supervisor that is told to end, or has lost another one."""
        deadline = time.monotonic() + seconds
        while self.told is None and (left := deadline - time.monotonic()) > 0:
            event = self.get(left)
            if isinstance(event, PeerLost):
                self.put(event)
                return


@contextmanager
def signals_into(inbox: Inbox) -> Iterator[None]:
    """Puts the signals that ask for an end into the inbox, for as long as the block lasts."""

    def put(number: int, frame: FrameType | None) -> None:
        inbox.put(Told(_FORWARDED[signal.Signals(number)]))

    before = {number: signal.signal(number, put) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
