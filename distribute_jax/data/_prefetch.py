"""Prefetching in a background thread, and a warning if the loop waits for its input."""

from __future__ import annotations

import atexit
import contextvars
import logging
import math
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from itertools import starmap
from queue import SimpleQueue
from typing import Any

import jax

from distribute_jax import _context, _frames
from distribute_jax._errors import ContextError
from distribute_jax._interrupts import interrupts_held_back

_EXIT_TIMEOUT = 2.0
"""Seconds that Python waits at exit for a source that is being read."""

_RAISED_IN_THREAD = (
    "This was raised while a batch was read ahead, in a background thread. To read in the thread of the "
    "loop, pass InputOptions(experimental_per_replica_buffer_size=0)."
)

_INTERRUPTED = (
    "Ctrl-C interrupted this iterator while it prepared a batch, and ended its pass. Start another with "
    "iter(dataset), and iterator.restore(state) for the position that was saved last."
)

_HANDOVER_SECONDS = 0.0003
"""How long it takes to pass an element between threads: in that time the loop may read one itself."""

_MAX_DELAY = 0.002
"""Seconds beyond ``_HANDOVER_SECONDS``, of all elements together, after which the thread starts."""

_MAX_DELAY_OF_ONE = 0.6 * _MAX_DELAY
"""What one element counts at most: one pause of the process, as of a garbage collection, starts no thread."""

_log = logging.getLogger("distribute_jax")


class Prefetcher(Iterator[Any]):
    """Yields the elements of a generator, which runs in a background thread.

    At most ``depth`` elements are in progress or ready. ``next`` raises an exception of the generator at its
    position. The thread ends, and closes the generator, at the end of the elements, after an exception,
    when the prefetcher is garbage collected, and when Python exits. It runs in the context of the first
    ``next``. ``stalls`` counts how long each ``next`` waits.

    With ``can_change_thread`` the generator may start in one thread and continue in another. It then stays
    in the thread of the loop while that is faster than passing elements between threads.
    """

    def __init__(
        self,
        elements: Generator[Any, None, None],
        depth: int,
        stalls: InputStallMonitor,
        *,
        can_change_thread: bool = False,
    ) -> None:
        self._stalls = stalls
        self._buffer = _Buffer(depth)
        self._elements: Any = elements
        """The generator; None once the thread has it."""
        self._delay = -math.inf if can_change_thread else math.inf
        # The thread refers to the buffer and not to this object, which can therefore be collected.
        weakref.finalize(self, self._buffer.stop).atexit = False

    def __next__(self) -> Any:
        start = time.perf_counter()
        if self._elements is not None and self._delay <= _MAX_DELAY:
            try:
                element = next(self._elements)
            except KeyboardInterrupt:
                self._buffer.put(None, ContextError(_INTERRUPTED))
                self._elements = None
                raise
            elapsed = time.perf_counter() - start
            # Not of the first element, whose time includes starting the source and compiling.
            delay = min(elapsed - _HANDOVER_SECONDS, _MAX_DELAY_OF_ONE)
            self._delay = max(0.0, self._delay + delay)
            if self._delay > _MAX_DELAY:
                self._start()
            return element
        if self._elements is not None:
            self._start()
        element = self._buffer.take()
        self._stalls.waited(time.perf_counter() - start)
        return element

    def _start(self) -> None:
        config: Any = jax.config
        settings = _settings(_frames.entered(), config.jax_enable_x64, config.jax_default_device)
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(_read_ahead, self._elements, self._buffer, settings),
            name="distribute_jax prefetch",
            daemon=True,
        )
        # A KeyboardInterrupt can break Python's wait for the start: the next call would then hang.
        with interrupts_held_back():
            thread.start()
            _running[thread] = self._buffer
            self._elements = None


class _Buffer:
    """The bounded buffer between the thread and the loop."""

    # SimpleQueue, because the finalizer calls stop, and of queues only its put is reentrant.
    def __init__(self, depth: int) -> None:
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._free_slots: SimpleQueue[None] = SimpleQueue()
        self._taken: list[tuple[Any, BaseException | None]] = []  # of an interrupted ``take``
        self._ended = False
        for _ in range(depth):
            self._free_slots.put(None)

    def wait_for_slot(self) -> bool:
        """Blocks the thread until there is a free slot; returns False if the thread should end."""
        self._free_slots.get()
        return not self._ended

    def put(self, element: Any, error: BaseException | None = None) -> None:
        self._ready.put((element, error))

    def stop(self) -> None:
        """Makes the thread end."""
        self._ended = True
        self._free_slots.put(None)
        self._ready.put((None, StopIteration()))

    def take(self) -> Any:
        """Blocks the loop until there is an element, an error or the end."""
        if self._ended:
            raise StopIteration
        if not self._taken:  # in C, where an interrupt cannot discard what was taken
            self._taken.extend(starmap(self._ready.get, ((),)))
        element, error = self._taken[0]
        self._free_slots.put(None)
        self._taken.clear()
        if error is None:
            return element
        self._ended = True
        if not isinstance(error, (StopIteration, ContextError)):
            error.add_note(_RAISED_IN_THREAD)
        raise error


_running: weakref.WeakKeyDictionary[threading.Thread, _Buffer] = weakref.WeakKeyDictionary()


@contextmanager
def _settings(top: _frames.Frame | None, x64: bool, device: Any) -> Iterator[None]:
    """Applies the JAX settings and the strategy of the loop in this thread."""
    scope = nullcontext() if top is None else top.strategy.scope()
    with jax.enable_x64(x64), jax.default_device(device), scope, _context.prefetching():
        yield


def _read_ahead(
    elements: Generator[Any, None, None], buffer: _Buffer, settings: AbstractContextManager[None]
) -> None:
    end: BaseException = StopIteration()
    try:
        with settings, closing(elements), suppress(StopIteration):
            while buffer.wait_for_slot():
                buffer.put(next(elements))
    except BaseException as error:  # every error must reach the loop
        end = error
    buffer.put(None, end)


@atexit.register
def _end_threads() -> None:
    """Ends the threads before Python and JAX destroy what they use."""
    for buffer in list(_running.values()):
        buffer.stop()
    for thread in list(_running):
        thread.join(timeout=_EXIT_TIMEOUT)


_MIN_ELEMENTS, _MIN_SECONDS = 20, 5.0
"""The shortest period that is judged; both must be reached."""

_MAX_WAITING_SHARE = 0.2
"""The part of the time that a loop may wait for its batches without a warning."""


class InputStallMonitor:
    """Warns once when a loop waits for its input for much of the time.

    The first element of each period does not count: its time includes starting the source and compiling.
    """

    def __init__(self) -> None:
        self._warned = False
        self.restart()

    def restart(self) -> None:
        """Starts a new period, as each loop over a dataset does."""
        self._start: float | None = None
        self._elements, self._waiting = 0, 0.0

    def waited(self, seconds: float) -> None:
        """Counts one element for which the loop waited."""
        now = time.perf_counter()
        if self._warned:
            return
        if self._start is None:
            self._start = now
            return
        self._elements += 1
        self._waiting += seconds
        passed = now - self._start
        if self._elements < _MIN_ELEMENTS or passed < _MIN_SECONDS:
            return
        if self._waiting > _MAX_WAITING_SHARE * passed:
            self._warn(passed)
        self.restart()

    def _warn(self, passed: float) -> None:
        self._warned = True
        _log.warning(
            "The devices wait for the input pipeline: over the last %d batches the loop waited for "
            "data %.0f %% of the time, %.0f of %.0f ms for each batch. Make the pipeline faster (read "
            "and decode in several workers, as Grain's mp_prefetch and the num_workers of a DataLoader "
            "do; cache what fits in memory; send uint8 and convert on the device), or accept it. This "
            "is logged once for each dataset.",
            self._elements,
            100 * self._waiting / passed,
            1000 * self._waiting / self._elements,
            1000 * passed / self._elements,
        )
