"""Drives the workers of a strategy: one thread for each hands it closures, or computes them itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from distribute_jax._errors import UnsupportedError
from distribute_jax.program._halves import Halves
from distribute_jax.servers._coordinator import Coordinator, Work
from distribute_jax.servers._store import Store
from distribute_jax.servers._wire import WireError
from distribute_jax.servers._worker import run

_SECONDS_TO_END = 10.0


class Worker(Protocol):
    """A worker, as the coordinator reaches it."""

    def run(self, work: Work, data: list[Any]) -> list[Any]:
        """Does a run and returns its results; raises WireError if it must be done again, WorkerLostError."""

    def stop(self) -> None:
        """Lets it end."""


class WorkerLostError(Exception):
    """A worker has ended, or cannot be reached."""

    def __init__(self, reason: str, *, has_work: bool = True) -> None:
        """Takes why, and whether the work may be to blame: it was sent, in part at least."""
        super().__init__(reason)
        self.has_work = has_work


class Engine:
    """The workers of one strategy: a lost one is replaced by another of the same number."""

    def __init__(self, coordinator: Coordinator, worker: Callable[[int], Worker]) -> None:
        """Takes what makes the worker of a number; starts as many as the coordinator has."""
        self._coordinator, self._worker = coordinator, worker
        self._threads: list[threading.Thread] = []
        self.resize(coordinator.workers)

    def resize(self, workers: int) -> None:
        """Starts workers up to so many; those beyond end by themselves, when their closure is over."""
        leaving = self._threads[workers:]
        del self._threads[workers:]  # also if the wait for them is interrupted
        for thread in leaving:
            thread.join()
        while len(self._threads) < workers:
            self._threads.append(self._started(len(self._threads)))

    def _started(self, index: int) -> threading.Thread:
        name = f"worker {index} of parameter servers"
        thread = threading.Thread(target=self._drive, args=(index,), name=name, daemon=True)
        thread.start()
        return thread

    def kill(self, kind: str, number: int) -> None:
        """Ends the process of a worker or a server."""
        raise UnsupportedError(
            f'dj.testing.kill: {kind} {number} is a thread of this process. Use engine="processes".'
        )

    def check(self, halves: Halves) -> None:
        """Refuses a step that these workers cannot run."""

    def stop(self) -> None:
        """Waits until the workers have ended what they were doing: none computes while Python ends."""
        self._coordinator.stop()
        end = time.monotonic() + _SECONDS_TO_END
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))

    def _drive(self, index: int) -> None:
        worker = None
        try:
            while True:
                worker = worker or self._worker(index)  # others may have the work while it starts
                if (work := self._coordinator.take(index)) is None:
                    break
                try:
                    data = work.closure.data_of(index, work.attempt.share)
                    results = worker.run(work, data)
                except WireError:
                    self._coordinator.give_up(index)
                except WorkerLostError as error:
                    worker = None
                    if error.has_work:
                        self._coordinator.lose(work, error)
                    else:
                        self._coordinator.give_up(index)
                except BaseException as error:
                    self._coordinator.fail(work, error)
                else:
                    self._coordinator.hand_over(work, results)
        except BaseException as error:
            # A worker that ended in silence would be waited for.
            self._coordinator.fail_for_good(error)
        finally:
            if worker is not None:
                worker.stop()


def threads(
    coordinator: Coordinator, stores: Sequence[Store], devices: Sequence[jax.Device]
) -> Engine:
    """Starts the workers; each computes on one of the devices."""
    return Engine(
        coordinator,
        lambda index: _Thread(stores, (devices[index % len(devices)], coordinator.device)),
    )


class _Thread:
    """A worker of this process: it computes in the thread that drives it."""

    def __init__(self, stores: Sequence[Store], devices: tuple[jax.Device, jax.Device]) -> None:
        self._stores, self._devices = stores, devices

    def run(self, work: Work, data: list[Any]) -> list[Any]:
        return run(work.closure.program.worker, work.order, data, self._stores, self._devices)

    def stop(self) -> None:
        pass
