"""Functions that the processes of a local cluster run in docs/testing.md and docs/many_processes.md."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import distribute_jax as dj


def ids_of_all() -> np.ndarray:
    """Connects the processes, and gathers their process ids."""
    resolver = dj.cluster_resolver.detect()
    jax.distributed.initialize(
        resolver.coordinator_address,
        resolver.num_processes,
        resolver.process_id,
        coordinator_bind_address=resolver.coordinator_address,  # not visible from other machines
    )
    return multihost_utils.process_allgather(resolver.process_id)


def count() -> None:
    """Reports ten steps, as a training loop would."""
    for step in range(10):
        dj.report_step(step)


def what_each_sees() -> dict[str, Any]:
    """Shows, for docs/many_processes.md, which values are local and which are the same on all."""
    strategy = dj.MultiWorkerMirroredStrategy()
    (batch,) = strategy.distribute_dataset(dj.data.from_arrays(np.arange(8)).batch(8))
    doubled = strategy.run(lambda x: 2 * x, args=(batch,))
    try:
        refused = strategy.run(lambda x, scale: scale * x, args=(batch, 1 + jax.process_index()))
    except dj.ProcessesDifferError as error:
        refused = str(error)
    return {
        "chief": dj.is_chief(),
        "replicas": strategy.num_replicas_in_sync,
        "batch": [share.tolist() for share in batch.values],
        "local results": [x.tolist() for x in strategy.experimental_local_results(doubled)],
        "sum": int(strategy.reduce("sum", doubled, axis=0)),
        "gathered": strategy.gather(doubled, axis=0).tolist(),
        "refused": refused,
    }
