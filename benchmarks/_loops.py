"""The best epoch that can be written by hand: batches are sent ahead, few steps are unfinished."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks._steps import flat_state, flat_step, mesh_of, placed, shard_map_parts
from benchmarks._workloads import Array, Workload

Loop = Callable[[], Any]
"""Runs one epoch; gives what there is to wait for."""

AHEAD = 2
"""Batches that are sent before they are used, and steps that may be unfinished."""


def sent_ahead(batches: Iterable[Any], to: NamedSharding) -> Iterator[Any]:
    """Sends batches to the devices while earlier steps run."""
    ready: deque[Any] = deque()
    flow = iter(batches)
    for batch in itertools.islice(flow, AHEAD):
        ready.append(jax.device_put(batch, to))
    while ready:
        yield ready.popleft()
        for batch in itertools.islice(flow, 1):
            ready.append(jax.device_put(batch, to))


def hand_written_loop(
    work: Workload, batches: Iterable[Any], replicas: int, together: int = 1
) -> Callable[[], list[Any]]:
    """Returns an epoch of the hand-written step; it gives each dispatch's losses, still unfinished.

    Args:
        work: what is trained.
        batches: what an epoch goes over: x and y, with a leading dim of ``together`` where above 1.
        replicas: how many.
        together: steps in one dispatch.
    """
    mesh = mesh_of(replicas)
    if together == 1:
        jitted, state, _ = shard_map_parts(work, mesh)
        split = NamedSharding(mesh, P("data"))
    else:
        jitted, state = _several_steps(work, replicas)
        split = NamedSharding(mesh, P(None, "data"))
    return training_loop(jitted, state, lambda: sent_ahead(batches, split))


def training_loop(
    jitted: Any, state: list[Any], batches: Callable[[], Iterable[Any]]
) -> Callable[[], list[Any]]:
    """Returns an epoch over batches that are on the devices, with few steps unfinished."""
    held = [state]

    def loop() -> list[Any]:
        losses = []
        for number, (x, y) in enumerate(batches()):
            *held[0], loss = jitted(*held[0], x, y)
            losses.append(loss)
            if number >= AHEAD:
                jax.block_until_ready(losses[number - AHEAD])
        return losses

    return loop


def _several_steps(work: Workload, replicas: int) -> tuple[Any, list[Any]]:
    """Writes the step as a scan over batches stacked along a leading dim."""
    leaves, structure = flat_state(work)
    mesh, count = mesh_of(replicas), len(leaves)
    one = flat_step(work, structure, summed=True)

    def body(state: list[Any], batch: tuple[Any, Any]) -> tuple[list[Any], Any]:
        *state, loss = one(*state, *batch)
        return state, loss

    def several(*flat: Any) -> list[Any]:
        state, losses = jax.lax.scan(body, list(flat[:-2]), flat[-2:])
        return [*state, losses]

    mapped = jax.shard_map(
        several,
        mesh=mesh,
        in_specs=(P(),) * count + (P(None, "data"),) * 2,
        out_specs=[P()] * count + [P(None, "data")],
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=tuple(range(count)))
    return jitted, [placed(leaf, NamedSharding(mesh, P())) for leaf in leaves]


def in_batches(work: Workload, together: int = 1) -> list[tuple[Array, Array]]:
    """Cuts an epoch in memory into batches, without copying; several have a leading dim."""
    arrays = work.data(work.batch * work.batches)
    shape = (-1, work.batch) if together == 1 else (-1, together, work.batch)
    x, y = (a.reshape(*shape, *a.shape[1:]) for a in arrays)
    return list(zip(x, y, strict=True))


def mean_loss(losses: list[Any], batches: int) -> float:
    """Reads an epoch's mean loss from what each dispatch gave."""
    return sum(float(np.sum(np.asarray(loss), dtype=np.float64)) for loss in losses) / batches
