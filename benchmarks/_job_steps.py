"""One training step in a job of several processes: under ``run``, and written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

import distribute_jax as dj
from benchmarks._harness import interleaved
from benchmarks._steps import Step, carried, shard_map_parts, trained_under
from benchmarks._workloads import MLP

RUN, BY_HAND, ALONE = "strategy.run", "hand-written", "without all-reduce"


def times(batch: int, rounds: int, calls: int) -> dict[str, Any]:
    """Times the ways to write the step in this process, in step with all others.

    Args:
        batch: examples of the global batch.
        rounds: turns of each way.
        calls: steps in one turn.

    Returns:
        Seconds of one step for each way and round, and the losses of the first steps of two of them.
    """
    work = replace(MLP, batch=batch)
    strategy = dj.MultiWorkerMirroredStrategy()
    mesh = Mesh(strategy.mesh.devices, ("data",), axis_types=(AxisType.Auto,))
    steps: dict[str, Step] = {
        RUN: trained_under(strategy, work).run,
        BY_HAND: carried(*shard_map_parts(work, mesh)),
        ALONE: carried(*shard_map_parts(work, mesh, summed=False)),
    }
    losses = {name: [_total(steps[name]()) for _ in range(3)] for name in (RUN, BY_HAND)}
    seconds = interleaved(steps, rounds=rounds, calls=calls)
    return {"losses": losses, "seconds": seconds}


def _total(loss: Any) -> float:
    array = loss.global_array if isinstance(loss, dj.PerReplica) else jax.numpy.atleast_1d(loss)
    return float(np.sum(multihost_utils.process_allgather(array, tiled=True)))
