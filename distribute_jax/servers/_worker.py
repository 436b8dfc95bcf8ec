"""What a worker does with a closure: it fetches the state, computes, and stages its parts on the servers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from distribute_jax.program._halves import LookupHalf
from distribute_jax.program._rows import filled, joined
from distribute_jax.servers._wire import Message, WireError


class Link(Protocol):
    """A server, as a worker reaches it."""

    def request(self, message: Message) -> Callable[[], Message]:
        """Asks to fetch or to stage; returns what waits for the answer."""


class WorkerProgram(NamedTuple):
    """The worker's half of a step."""

    name: str
    compute: Callable[[list[Any], list[Any]], list[Any]]
    """Returns what is handed over, of the state that it reads and of data."""
    takes: Sequence[Sequence[int]]
    """For each server, what of that it is sent; empty where the step writes no state."""
    results_at: Sequence[int]
    """What of that the step returns."""
    lookups: LookupHalf | None = None
    """What of all this is by rows."""


class Order(NamedTuple):
    """A run that a worker is to do."""

    epoch: int
    run: int
    places: Sequence[Sequence[int]]
    """For each server, where what it has set aside is among what the program reads, or a part of it."""
    rows: Sequence[Sequence[Sequence[int] | None]]
    """Of what it has a part, which rows these are."""
    faults: Sequence[float] = ()
    """What goes wrong with messages to servers, on purpose: see ``_FaultyLink``."""


class _FaultyLink:
    """A link of which messages are lost, sent twice or late, as the dice of a run say."""

    def __init__(self, link: Link, order: Order, server: int) -> None:
        lost, duplicated, delayed, self._seconds, seed = order.faults
        self._link, self._random = link, random.Random(f"{seed} {order.run} {server}")
        self._lost, self._duplicated, self._delayed = lost, duplicated, delayed

    def _meets(self, share: float) -> bool:
        return self._random.random() < share

    def _arrives(self) -> None:
        if self._meets(self._delayed):
            time.sleep(self._seconds)
        if self._meets(self._lost):
            raise WireError("a message was lost")

    def request(self, message: Message) -> Callable[[], Message]:
        self._arrives()
        if message.name == "stage" and self._meets(self._duplicated):
            self._link.request(message)()
        wait = self._link.request(message)

        def answer() -> Message:
            reply = wait()
            self._arrives()
            return reply

        return answer


def run(
    program: WorkerProgram,
    order: Order,
    data: list[Any],
    links: Sequence[Link],
    devices: tuple[jax.Device, jax.Device],
) -> list[Any]:
    """Does a run, and returns the results when all servers have what they need.

    Raises WireError where a server cannot be reached, or the servers have gone back.
    """
    here, there = devices  # that of the worker, and where what it sends is put
    if order.faults:
        links = [_FaultyLink(link, order, server) for server, link in enumerate(links)]
    ids = [] if program.lookups is None else _looked_up(program.lookups, data)
    read, answers = [], []
    for at, rows, link in zip(order.places, order.rows, links, strict=True):
        if at:
            asked, numbers = _asked(program.lookups, at, rows, ids)
            read.append(at)
            message = Message("fetch", [order.epoch, order.run, asked], numbers)
            answers.append(link.request(message))
    came = [answer() for answer in answers]
    if any(message.name == "void" for message in came):
        raise WireError("the servers have gone back")
    arrays = [list(message.arrays) for message in came]
    pulled = arrays[0] if len(arrays) == 1 else _joined(read, arrays)
    if program.lookups is not None:
        most = [of.number for of in program.lookups.lookups]
        pulled = [
            x if j is None else _filled(x, most[j])
            for x, j in zip(pulled, program.lookups.pulls, strict=True)
        ]
        data = [*data, *(_filled(x + 1, n) for x, n in zip(ids, most, strict=True))]
    handed = program.compute(_moved(pulled, there, here), _on(here, data))
    handed = _moved(handed, here, there)
    for array in handed:
        array.block_until_ready()
    plain = [order.epoch, order.run, program.name]
    staged = [
        link.request(Message("stage", plain, _sent(program, server, handed, ids)))
        for server, link in enumerate(links[: len(program.takes)])
    ]
    for answer in staged:
        answer()
    return [handed[i] for i in program.results_at]


def _joined(read: list[Sequence[int]], arrays: list[Any]) -> list[Any]:
    """Returns arrays of the parts that the servers have."""
    parts: dict[int, list[Any]] = {}
    for at, of in zip(read, arrays, strict=True):
        for i, value in zip(at, of, strict=True):
            parts.setdefault(i, []).append(value)
    return [joined(parts[i]) for i in range(len(parts))]


def _moved(values: list[Any], old: jax.Device, new: jax.Device) -> list[Any]:
    moved: list[Any] = values if old == new else jax.device_put(values, new)
    return moved


def _on(device: jax.Device, values: Sequence[Any]) -> list[Any]:
    """Returns arrays of a device; numbers of the host go where the arrays beside them are."""
    return [
        jax.device_put(x, device) if hasattr(x, "devices") and x.devices() != {device} else x
        for x in values
    ]


def _looked_up(half: LookupHalf, data: list[Any]) -> list[Any]:
    """Returns, for each lookup, the numbers of its rows, sorted."""
    indices = [np.asarray(x)[..., 0].astype(np.int32).ravel() for x in half.compute([], data)]
    some = [
        [np.clip(indices[i], 0, of.rows - 1) if clip else indices[i] for i, clip in of.indices]
        for of in half.lookups
    ]
    pairs = zip(half.lookups, some, strict=True)
    return [_within(np.unique(np.concatenate(of_one)), (0, of.rows)) for of, of_one in pairs]


def _within(ids: Any, rows: Any) -> Any:
    """Returns the numbers of rows that are among those from one to another, which have them as 0, 1, ...."""
    return ids if rows is None else ids[slice(*np.searchsorted(ids, rows))] - np.int32(rows[0])


def _asked(
    half: LookupHalf | None, at: Sequence[int], rows: Sequence[Any], ids: Sequence[Any]
) -> tuple[list[int], list[Any]]:
    """Returns of which of its arrays a server is asked for some rows, and for which."""
    if half is None:
        return [], []
    by = [half.pulls[i] for i in at]
    asked = [n for n, j in enumerate(by) if j is not None]
    return asked, [_within(ids[j], rows[n]) for n, j in enumerate(by) if j is not None]


def _sent(
    program: WorkerProgram, server: int, handed: Sequence[Any], ids: Sequence[Any]
) -> list[Any]:
    """Returns what is sent to a server, of what a worker hands over."""
    values, half = [handed[i] for i in program.takes[server]], program.lookups
    if half is None:
        return values
    for k, of in enumerate(half.takes[server]):
        if of is not None:
            j, rows = of
            some = slice(len(ids[j])) if rows is None else slice(*np.searchsorted(ids[j], rows))
            values[k] = np.asarray(values[k])[some]
    return [*values, *(_within(ids[j], rows) + 1 for j, rows in half.ids[server])]


def _filled(array: Any, number: int) -> Any:
    """Returns an array with zeros in the place of rows that are not there."""
    return filled(array, jax.ShapeDtypeStruct((number, *array.shape[1:]), array.dtype))
