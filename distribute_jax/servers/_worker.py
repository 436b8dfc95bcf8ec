"""A worker's run of a closure: it fetches the state, computes, and stages its parts of the update."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distribute_jax.servers._halves import LookupHalf
from distribute_jax.servers._rows import filled, joined
from distribute_jax.servers._wire import Message, WireError

Link = Callable[[Message], Callable[[], Message]]
"""Sends a request to fetch or to stage to a server; returns what waits for the answer."""

Devices = tuple[jax.Device, jax.Device]
"""Where a worker computes, and where it puts what it sends."""


class WorkerProgram(NamedTuple):
    """The worker's half of a step."""

    name: str
    compute: Callable[[list[Any], list[Any]], list[Any]]
    """Returns what is handed over, from the state that it reads and data."""
    takes: Sequence[Sequence[int]]
    """For each server, what of that it is sent; empty if the step writes no state."""
    results_at: Sequence[int]
    """What of that the step returns."""
    lookups: LookupHalf | None = None


class Order(NamedTuple):
    """A run that a worker is to do."""

    epoch: int
    run: int
    places: Sequence[Sequence[int]]
    """For each server, the positions of what it has set aside among what the program reads."""
    rows: Sequence[Sequence[Sequence[int] | None]]
    """Which rows of these arrays it stores; None for all."""
    faults: Sequence[float] = ()
    """For tests: lost, duplicated, delayed, seconds and seed, as of ``dj.testing.disturb_messages``."""


def _faulty(link: Link, order: Order, server: int) -> Link:
    """Returns a link whose messages are lost, sent twice or late, at random but reproducibly."""
    lost, duplicated, delayed, seconds, seed = order.faults
    draw = random.Random(f"{seed} {order.run} {server}").random

    def arrived(message: Message) -> Message:
        if draw() < delayed:
            time.sleep(seconds)
        if draw() < lost:
            raise WireError("a message was lost")
        return message

    def request(message: Message) -> Callable[[], Message]:
        arrived(message)
        if message.name == "stage" and draw() < duplicated:
            link(message)()
        wait = link(message)
        return lambda: arrived(wait())

    return request


def run(
    program: WorkerProgram, order: Order, data: list[Any], links: Sequence[Link], devices: Devices
) -> list[Any]:
    """Returns the results of a run that is staged on all servers; raises WireError if one has gone back."""
    local, state_device = devices
    if order.faults:
        links = [_faulty(link, order, server) for server, link in enumerate(links)]
    ids = [] if program.lookups is None else _looked_up(program.lookups, data)
    read, answers = [], []
    for at, rows, link in zip(order.places, order.rows, links, strict=True):
        if at:
            by_rows, numbers = _requested_rows(program.lookups, at, rows, ids)
            read.append(at)
            message = Message("fetch", [order.epoch, order.run, by_rows], numbers)
            answers.append(link(message))
    replies = [answer() for answer in answers]
    if any(message.name == "void" for message in replies):
        raise WireError("the servers have returned to a snapshot")
    pulled = _joined(read, [message.arrays for message in replies])
    if program.lookups is not None:
        most = [lookup.number for lookup in program.lookups.lookups]
        pulled = [
            x if j is None else _filled(x, most[j])
            for x, j in zip(pulled, program.lookups.pulls, strict=True)
        ]
        data = [*data, *(_filled(x + 1, n) for x, n in zip(ids, most, strict=True))]
    handed = program.compute(_moved(pulled, state_device, local), _on(local, data))
    handed = jax.block_until_ready(_moved(handed, local, state_device))
    plain = [order.epoch, order.run, program.name]
    staged = [
        link(Message("stage", plain, _sent(program, server, handed, ids)))
        for server, link in enumerate(links[: len(program.takes)])
    ]
    for answer in staged:
        answer()
    return [handed[i] for i in program.results_at]


def _joined(read: list[Sequence[int]], arrays: list[Sequence[Any]]) -> list[Any]:
    """Returns what a program reads, from the arrays or rows that each server sent."""
    parts: dict[int, list[Any]] = {}
    for at, values in zip(read, arrays, strict=True):
        for i, value in zip(at, values, strict=True):
            parts.setdefault(i, []).append(value)
    return [joined(parts[i]) for i in range(len(parts))]


def _moved(values: list[Any], old: jax.Device, new: jax.Device) -> list[Any]:
    return values if old == new else list(jax.device_put(values, new))


def _on(device: jax.Device, values: Sequence[Any]) -> list[Any]:
    """Moves arrays to a device; NumPy arrays go where the arrays beside them are."""
    return [
        jax.device_put(x, device) if hasattr(x, "devices") and x.devices() != {device} else x
        for x in values
    ]


def _filled(array: Any, number: int) -> Any:
    """Pads rows with zeros to their maximal number."""
    return filled(array, jax.ShapeDtypeStruct((number, *array.shape[1:]), array.dtype))


def _looked_up(half: LookupHalf, data: list[Any]) -> list[Any]:
    """Returns the sorted row numbers of each lookup."""
    indices = [np.asarray(x)[..., 0].astype(np.int32).ravel() for x in half.compute([], data)]
    rows = []
    for lookup in half.lookups:
        last = lookup.rows - 1
        ids = [indices[i].clip(0, last) if clip else indices[i] for i, clip in lookup.indices]
        rows.append(_within(np.unique(np.concatenate(ids)), (0, lookup.rows)))
    return rows


def _within(ids: Any, rows: Any) -> Any:
    """Returns the ids that are among some rows, counted from the first of these."""
    return ids if rows is None else ids[slice(*np.searchsorted(ids, rows))] - np.int32(rows[0])


def _requested_rows(
    half: LookupHalf | None, at: Sequence[int], rows: Sequence[Any], ids: Sequence[Any]
) -> tuple[list[int], list[Any]]:
    """Returns of which of a server's arrays only some rows are requested, and which rows."""
    lookups = [None if half is None else half.pulls[i] for i in at]
    by_rows = [n for n, j in enumerate(lookups) if j is not None]
    return by_rows, [_within(ids[j], rows[n]) for n, j in enumerate(lookups) if j is not None]


def _sent(
    program: WorkerProgram, server: int, handed: Sequence[Any], ids: Sequence[Any]
) -> list[Any]:
    """Returns what a server is sent of what the worker computed."""
    values, half = [handed[i] for i in program.takes[server]], program.lookups
    if half is None:
        return values
    for k, lookup in enumerate(half.takes[server]):
        if lookup is not None:
            j, rows = lookup
            at = slice(len(ids[j])) if rows is None else slice(*np.searchsorted(ids[j], rows))
            values[k] = np.asarray(values[k])[at]
    return [*values, *(_within(ids[j], rows) + 1 for j, rows in half.ids[server])]
