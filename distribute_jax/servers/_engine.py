"""Drives the workers of a strategy: a thread for each hands it closures, or computes them itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distribute_jax._errors import UnsupportedError
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax.program._halves import Halves
from distribute_jax.servers._coordinator import Coordinator
from distribute_jax.servers._state import Program
from distribute_jax.servers._wire import WireError
from distribute_jax.servers._worker import Order, run

_SECONDS_TO_END = 10.0


Worker = Callable[[Program, Order, list[Any]], list[Any]]
"""Returns the results of a run; raises WorkerLostError, or WireError if it must be repeated."""


class WorkerLostError(Exception):
    """A worker has ended, or cannot be reached; ``has_work`` if the work it was sent may be to blame."""

    def __init__(self, reason: str, *, has_work: bool = True) -> None:
        super().__init__(reason)
        self.has_work = has_work


class Engine:
    """The workers of one strategy, here threads; a lost worker is replaced by one of the same number."""

    def __init__(self, coordinator: Coordinator, devices: Sequence[jax.Device] = ()) -> None:
        self._coordinator, self._devices = coordinator, devices
        self._stores: Sequence[Any] = coordinator.stores
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the workers, if they have not been started."""
        with self._starting:  # two threads may schedule
            if not self.has_started:
                try:
                    self._start_servers()
                    with interrupts_held_back():
                        self._start_threads()
                except BaseException:
                    self._close()
                    raise

    def _start_servers(self) -> None:
        """Starts servers that are not objects of this process."""

    def _start_threads(self) -> None:
        for index in range(len(self._threads), self._coordinator.workers):
            name = f"worker {index} of parameter servers"
            thread = threading.Thread(target=self._drive, args=(index,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def has_started(self) -> bool:
        return bool(self._threads)

    def resize(self, workers: int) -> None:
        """Changes the number of workers; waits for those that leave to finish what they run."""
        self._coordinator.resize(workers)
        if self.has_started:
            leaving = self._threads[workers:]
            del self._threads[workers:]  # also if the wait for them is interrupted
            for thread in leaving:
                thread.join()
            self._start_threads()

    def kill(self, kind: str, number: int) -> None:
        raise UnsupportedError(
            f'dj.testing.kill: {kind} {number} is a thread of this process. Use engine="processes".'
        )

    def check(self, halves: Halves) -> None:
        """Refuses a step that these workers cannot run."""

    def stop(self) -> None:
        """Waits until the workers have finished what they run: none may compute while Python ends."""
        self._coordinator.stop()
        end = time.monotonic() + _SECONDS_TO_END
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))
        self._close()

    def _worker(self, index: int) -> Worker:
        """Starts a worker, here one that computes in the thread that calls it."""
        devices = self._devices[index % len(self._devices)], self._coordinator.device
        links = [store.request for store in self._stores]
        return lambda program, order, data: run(program.worker, order, data, links, devices)

    def _end(self, worker: Worker | None) -> None:
        """Ends a worker, if there is one."""

    def _close(self) -> None:
        """Ends the servers."""

    def _drive(self, index: int) -> None:
        worker: Worker | None = None
        try:
            while True:
                worker = worker or self._worker(index)  # others may take the work while it starts
                if (work := self._coordinator.take(index)) is None:
                    break
                attempt, order = work
                closure = attempt.closure
                try:
                    data = closure.data_of(index, attempt.share)
                    results = worker(closure.program, order, data)
                except WireError:
                    self._coordinator.give_up(attempt)
                except WorkerLostError as error:
                    self._end(worker)
                    worker = None
                    self._coordinator.give_up(attempt, error if error.has_work else None)
                except BaseException as error:
                    self._coordinator.fail(closure, error)
                else:
                    self._coordinator.hand_over(attempt, results)
        except BaseException as error:
            # Others would wait for a worker that ended silently.
            self._coordinator.fail_for_good(error)
        finally:
            self._end(worker)
