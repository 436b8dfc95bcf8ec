"""``record`` and ``replay``: a stale training repeated on one device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.coordinator import ClusterCoordinator


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("servers", "staleness", "engine"), [(2, 3, "threads"), (3, 8, "processes")]
)
def test_a_stale_training_is_repeated_bit_by_bit(servers: int, staleness: int, engine: str) -> None:
    """Four workers and Adam, with writes by the user; a changed result and a changed weight are named."""
    strategy = dj.ParameterServerStrategy(
        workers=4, servers=servers, max_staleness=staleness, engine=engine
    )
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(1))
        )
        optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
        rate = dj.Variable(1.0)

    def step(x: Any) -> Any:
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(rate[...] * (model(x)[:, 0] - x.sum(1)) ** 2)
        )(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    xs = np.random.default_rng(0).normal(size=(120, 8, 4)).astype(np.float32)
    for x in xs[:10]:
        coordinator.schedule(step, args=(x,))
    with dj.testing.record(strategy) as log:
        for i, x in enumerate(xs[10:]):
            if i == 60:
                coordinator.join()
                rate[...] = jnp.asarray(0.5)
            coordinator.schedule(step, args=(x,))
            if i in (30, 90) and engine == "processes":  # what is done again is in the log once
                for server in range(servers):
                    dj.testing.kill(strategy, server=server)
    assert log.updates == 110
    assert max(log.staleness) > 0, "some updates were stale"
    dj.testing.replay(log)
    coordinator.schedule(step, args=(xs[0],))
    dj.testing.replay(log)

    recording = log._recording
    results = recording.updates[5][1]
    results[0] = results[0] + 1
    key = next(iter(recording.last))
    recording.last[key] = np.asarray(recording.last[key]) + 1
    with pytest.raises(dj.NotEqualError, match=r"update 15, a run of .*step"):
        dj.testing.replay(log)


def test_threads_and_missing_processes_are_not_killed() -> None:
    strategy = dj.ParameterServerStrategy(workers=1)
    with pytest.raises(RuntimeError, match="start with the first closure"):
        dj.testing.kill(strategy, worker=0)
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(lambda: 1.0)
    coordinator.join()
    with pytest.raises(NotImplementedError, match=r"worker 0 is a thread .* engine=.processes"):
        dj.testing.kill(strategy, worker=0)
    with pytest.raises(ValueError, match="worker= or server="):
        dj.testing.kill(strategy)
    with pytest.raises(ValueError, match="server"):
        dj.testing.kill(strategy, server=1)


def test_other_strategies_nested_records_and_other_objects_are_refused() -> None:
    strategy = dj.ParameterServerStrategy(workers=1)
    with (
        dj.testing.record(strategy),
        pytest.raises(RuntimeError, match="being recorded"),
        dj.testing.record(strategy),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"must be dj\.ParameterServerStrategy"),
        dj.testing.record(dj.MirroredStrategy()),
    ):
        pass
    with pytest.raises(ValueError, match=r"log must be dj\.testing\.Log; got 3"):
        dj.testing.replay(3)  # type: ignore[arg-type]
