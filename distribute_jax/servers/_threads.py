"""Workers that are threads of this process: nothing to install, and arrays are handed over as they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax

from distribute_jax.servers._coordinator import Coordinator, Work

_SECONDS_TO_END = 10.0


class Threads:
    """One thread for each worker."""

    def __init__(self, coordinator: Coordinator, devices: Sequence[jax.Device]) -> None:
        """Starts the threads; each computes on one of the devices."""
        self._coordinator = coordinator
        self._threads = [
            threading.Thread(
                target=_work,
                args=(coordinator, worker, devices[worker % len(devices)]),
                name=f"worker {worker} of parameter servers",
                daemon=True,
            )
            for worker in range(coordinator.workers)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits until the threads have ended what they were doing: none computes while Python ends."""
        self._coordinator.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_SECONDS_TO_END)


def _work(coordinator: Coordinator, worker: int, device: jax.Device) -> None:
    try:
        while (work := coordinator.take(worker)) is not None:
            try:
                handed = _computed(work, worker, device)
            except BaseException as error:
                coordinator.fail(work, error)
            else:
                coordinator.hand_over(work, jax.device_put(handed, coordinator.device))
    except BaseException as error:
        # A worker that ended in silence would be waited for.
        coordinator.fail_for_good(error)


def _computed(work: Work, worker: int, device: jax.Device) -> list[jax.Array]:
    """Runs the worker's half on its device, and waits for it: what fails, fails here."""
    data = jax.device_put(work.closure.data(worker), device)
    pulled = jax.device_put(work.pulled, device)
    handed: list[jax.Array] = work.closure.program.bound.halves.worker(pulled, data)
    jax.block_until_ready(handed)
    return handed
