"""Prefetching: a bounded background thread, its context variables, and a warning about stalls."""

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
from queue import SimpleQueue
from typing import Any

import jax

from distribute_jax import _context, _frames
from distribute_jax._interrupts import interrupts_held_back

_AT_EXIT = 2.0
"""Seconds that the exit of Python waits for a source that is just being read."""

_IN_THREAD = (
    "This was raised while a batch was read ahead, in a background thread. To read in the thread of the "
    "loop, pass InputOptions(experimental_per_replica_buffer_size=0)."
)

_QUICK = 0.0003
"""Seconds that an element may take in the thread of the loop: to pass it between threads takes as long."""

_LATE = 0.002
"""Seconds beyond ``_QUICK``, of all elements together, after which the background thread starts."""

_log = logging.getLogger("distribute_jax")


class Prefetcher(Iterator[Any]):
    """Yields the elements of a generator, which runs in a background thread.

    At most ``depth`` elements are made and not yet taken, the one being made included. An exception of
    the generator is raised by ``next`` in its place. The thread ends, and closes the generator, at the
    end of the elements, after an exception, when the prefetcher is collected, and when Python exits. It
    runs in the context of the ``next`` that starts it. How long each ``next`` waits is counted in ``stalls``.

    With ``in_any_thread`` the generator may begin in one thread and go on in another. It then stays in the
    thread of the loop as long as its elements are made more quickly than threads pass them on.
    """

    def __init__(
        self,
        elements: Generator[Any, None, None],
        depth: int,
        stalls: InputStallMonitor,
        *,
        in_any_thread: bool = False,
    ) -> None:
        self._stalls = stalls
        self._buffer = _Buffer(depth)
        self._elements: Any = elements
        self._late = 0.0 if in_any_thread else math.inf
        # The thread refers to the buffer and not to this object, which can so be collected.
        weakref.finalize(self, self._buffer.stop).atexit = False

    def __next__(self) -> Any:
        start = time.perf_counter()
        if self._elements is not None and self._late <= _LATE:
            element = next(self._elements)
            self._late = max(0.0, self._late + time.perf_counter() - start - _QUICK)
            if self._late > _LATE:
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
        # An interrupt breaks Python's wait for the start; without a thread, the next call would hang.
        with interrupts_held_back():
            thread.start()
            _running[thread] = self._buffer
            self._elements = None


class _Buffer:
    """What the thread has made and the loop has not taken, and whether it has ended."""

    # Both ends are queues whose put may be called wherever garbage is collected.
    def __init__(self, depth: int) -> None:
        self._made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._ended = False
        for _ in range(depth):
            self._room.put(None)

    def wait_for_room(self) -> bool:
        """Blocks the thread until one more may be made; False if no more are wanted."""
        self._room.get()
        return not self._ended

    def put(self, element: Any, error: BaseException | None = None) -> None:
        self._made.put((element, error))

    def stop(self) -> None:
        """Makes the thread end: no more elements are wanted."""
        self._ended = True
        self._room.put(None)
        self._made.put((None, StopIteration()))

    def take(self) -> Any:
        """Blocks the loop until there is an element, an error or the end."""
        if self._ended:
            raise StopIteration
        element, error = self._made.get()
        self._room.put(None)
        if error is None:
            return element
        self._ended = True
        if not isinstance(error, StopIteration):
            error.add_note(_IN_THREAD)
        raise error


_running: weakref.WeakKeyDictionary[threading.Thread, _Buffer] = weakref.WeakKeyDictionary()


@contextmanager
def _settings(top: _frames.Frame | None, x64: bool, device: Any) -> Iterator[None]:
    """Makes JAX's settings and the strategy of another thread current in this one."""
    scope = nullcontext() if top is None else top.strategy.scope()
    with jax.enable_x64(x64), jax.default_device(device), scope, _context.prefetching():
        yield


def _read_ahead(
    elements: Generator[Any, None, None],
    buffer: _Buffer,
    settings: AbstractContextManager[None],
) -> None:
    end: BaseException = StopIteration()
    try:
        with settings, closing(elements), suppress(StopIteration):
            while buffer.wait_for_room():
                buffer.put(next(elements))
    except BaseException as error:  # whatever it is, the loop must hear of it
        end = error
    buffer.put(None, end)


@atexit.register
def _end_all() -> None:
    """Ends the threads before Python and JAX take down what they use."""
    for buffer in list(_running.values()):
        buffer.stop()
    for thread in list(_running):
        thread.join(timeout=_AT_EXIT)


_ELEMENTS, _SECONDS = 20, 5.0
"""What is judged: this many elements, or more of them until this much time has passed."""

_SHARE = 0.2
"""The part of the time that a loop may wait for its batches without a warning."""


class InputStallMonitor:
    """Warns once when a loop waits for its input for much of the time.

    The first element of each stretch is left out: it comes with starting the source and compiling.
    """

    def __init__(self) -> None:
        self._warned = False
        self.restart()

    def restart(self) -> None:
        """Begins a new stretch, as each loop over a dataset does."""
        self._start: float | None = None
        self._elements, self._waiting = 0, 0.0

    def waited(self, seconds: float) -> None:
        """Counts one element that the loop waited for."""
        now = time.perf_counter()
        if self._warned:
            return
        if self._start is None:
            self._start = now
            return
        self._elements += 1
        self._waiting += seconds
        passed = now - self._start
        if self._elements < _ELEMENTS or passed < _SECONDS:
            return
        if self._waiting > _SHARE * passed:
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
