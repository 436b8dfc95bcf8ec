"""Workers that are threads of this process: nothing to install, and arrays are handed over as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from distribute_jax.servers._coordinator import Coordinator, Work
from distribute_jax.servers._engine import Engine
from distribute_jax.servers._store import Store
from distribute_jax.servers._wire import WireError
from distribute_jax.servers._worker import RunIsVoid, run


def threads(
    coordinator: Coordinator, stores: Sequence[Store], devices: Sequence[jax.Device]
) -> Engine:
    """Starts the workers; each computes on one of the devices."""
    links = [StoreHere(store) for store in stores]
    return Engine(
        coordinator,
        lambda index: _Thread(links, (devices[index % len(devices)], coordinator.device)),
    )


class StoreHere:
    """A server of this process."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ask(self, request: str, *args: Any) -> Callable[[], Any]:
        return partial(getattr(self._store, request), *args)


class _Thread:
    """A worker of this process: it computes in the thread that drives it."""

    def __init__(self, links: Sequence[StoreHere], devices: tuple[jax.Device, jax.Device]) -> None:
        self._links, self._devices = links, devices

    def run(self, work: Work, data: list[Any]) -> list[Any]:
        try:
            return run(work.closure.program.worker, work.order, data, self._links, self._devices)
        except WireError as error:
            raise RunIsVoid from error

    def stop(self) -> None:
        pass
