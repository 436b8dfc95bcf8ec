"""What a worker does with a closure: it fetches the state, computes, and stages its parts on the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from distribute_jax.program._rows import joined


class Link(Protocol):
    """A server, as a worker reaches it."""

    def ask(self, request: str, *args: Any) -> Callable[[], Any]:
        """Sends a request to fetch or to stage; returns what waits for the answer."""


class WorkerProgram(NamedTuple):
    """The worker's half of a step."""

    name: str
    compute: Callable[[list[Any], list[Any]], list[Any]]
    """Returns what is handed over, of the state that it reads and of data."""
    takes: Sequence[Sequence[int]]
    """For each server, what of that it is sent; empty where the step writes no state."""
    results_at: Sequence[int]
    """What of that the step returns."""


class Order(NamedTuple):
    """A run that a worker is to do."""

    epoch: int
    run: int
    places: Sequence[Sequence[int]]
    """For each server, where what it has set aside is among what the program reads, or a part of it."""


class RunIsVoid(Exception):  # noqa: N818  nobody did anything wrong
    """The servers have gone back, and this run counts no more."""


def run(
    program: WorkerProgram,
    order: Order,
    data: list[Any],
    links: Sequence[Link],
    devices: tuple[jax.Device, jax.Device],
) -> list[Any]:
    """Does a run, and returns the results when all servers have what they need.

    Args:
        program: what to compute.
        order: the run.
        data: what the program takes beside state.
        links: the servers.
        devices: that of the worker, and where what it sends is put.

    Raises:
        RunIsVoid: it need not be done any more.
    """
    read = [(at, link) for at, link in zip(order.places, links, strict=True) if at]
    answers = [link.ask("fetch", order.epoch, order.run) for _, link in read]
    arrays = [answer() for answer in answers]
    if any(of is None for of in arrays):
        raise RunIsVoid
    parts: dict[int, list[Any]] = {}
    for (at, _), of in zip(read, arrays, strict=True):
        for i, value in zip(at, of, strict=True):
            parts.setdefault(i, []).append(value)
    pulled = [joined(parts[i]) for i in range(len(parts))]
    here, there = devices
    handed = program.compute(_on(here, pulled), _on(here, data))
    handed = jax.block_until_ready(_on(there, handed))
    staged = [
        link.ask("stage", order.epoch, order.run, program.name, [handed[i] for i in takes])
        for link, takes in zip(links, program.takes, strict=False)
    ]
    for answer in staged:
        answer()
    return [handed[i] for i in program.results_at]


def _on(device: jax.Device, values: Sequence[Any]) -> list[Any]:
    """Returns arrays of a device; numbers of the host go where the arrays beside them are."""
    return [
        jax.device_put(x, device) if isinstance(x, jax.Array) and x.device != device else x
        for x in values
    ]
