"""``workers_per_update``: several workers make one update, with the numbers of ``MirroredStrategy``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import assert_same_bits, numbers

import distribute_jax as dj
from distribute_jax.coordinator import ClusterCoordinator
from distribute_jax.servers import _engines

SECONDS = 60


def in_sync(replicas: int, **kwargs: Any) -> tuple[Any, Any]:
    """A strategy of two workers and its coordinator."""
    strategy = dj.ParameterServerStrategy(workers=2, workers_per_update=replicas, **kwargs)
    return strategy, ClusterCoordinator(strategy)


class Small(nnx.Module):
    """A layer with batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.drop(nnx.relu(self.norm(self.first(x)))))[:, 0]


def train(strategy: Any, run: Any) -> tuple[list[Any], Any]:
    """Trains for three steps; returns what they return, and all state."""
    with strategy.scope():
        model = Small(nnx.Rngs(0))
        clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
        optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)
        metric = nnx.metrics.Average("loss")
        seen = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)

    def step(x: jax.Array, scale: float) -> Any:
        replica = dj.get_replica_context()

        def loss_of(model: Small) -> Any:
            rows = jnp.square(model(x) - x.sum(1)) * scale
            return dj.compute_average_loss(rows), rows

        (loss, rows), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, replica.all_reduce("sum", grads))
        metric.update(loss=rows)
        seen.assign_add(x.shape[0])
        loss, mean = replica.all_reduce("sum", loss), replica.all_reduce("mean", rows.mean())
        weights = jnp.sum(optimizer.step[...])
        return loss, mean * scale + weights, replica.replica_id_in_sync_group, rows

    data = np.random.default_rng(0).normal(size=(3, 12, 5)).astype(np.float32)
    results = [run(step, (x, 0.5)) for x in strategy.distribute_dataset(list(data))]
    return results, lambda: nnx.to_pure_dict(nnx.state((model, optimizer, metric, seen)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("replicas", "servers"), [(2, 2), (3, 1)])
def test_workers_that_make_an_update_are_replicas(replicas: int, servers: int) -> None:
    """Results, weights, statistics, moments, metrics, sums and counts are those of MirroredStrategy."""
    mirrored = dj.MirroredStrategy(list(range(replicas)))
    wanted, state = train(mirrored, mirrored.run)
    wanted = [[getattr(x, "values", x) for x in result] for result in wanted]
    expected = numbers((wanted, state()))
    strategy, coordinator = in_sync(replicas, servers=servers)
    assert strategy.num_replicas_in_sync == replicas
    results, state = train(strategy, coordinator.schedule)
    coordinator.join(SECONDS)
    assert_same_bits(expected, numbers((coordinator.fetch(results), state())))
    assert coordinator.stats.version == 3
    assert sum(coordinator.stats.applied) == 3 * replicas


def test_the_share_of_a_lost_worker_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the way to the mean of 1 and 2, then of 3 and 4: 0.75 and 2.125, whoever is lost."""
    run, lost = _engines.run, []

    def losing(program: Any, order: Any, *args: Any) -> Any:
        if order.run == 2:
            lost.append(order)
            raise _engines.WorkerLostError("gone")
        return run(program, order, *args)

    monkeypatch.setattr(_engines, "run", losing)
    strategy, coordinator = in_sync(2)
    with strategy.scope():
        weight = nnx.Param(jnp.zeros(()))

    def step(x: jax.Array) -> None:
        grad = dj.get_replica_context().all_reduce("mean", (weight[...] - x)[0])
        weight[...] -= grad / 2

    batches = strategy.distribute_dataset([np.float32([1, 2]), np.float32([3, 4])])
    for batch, wanted in zip(batches, (0.75, 2.125), strict=True):
        coordinator.schedule(step, args=(batch,))
        coordinator.join(SECONDS)
        assert float(weight[...]) == wanted
    assert len(lost) == 1
    assert (coordinator.stats.version, sum(coordinator.stats.applied)) == (2, 4)


def test_an_update_of_several_workers_is_compared_with_one_device() -> None:
    """The sum of the gradients of means is twice that of one device; verify="off" allows it."""
    strategy, coordinator = in_sync(2)
    with strategy.scope():
        weight = nnx.Param(jnp.zeros(()))

    def step(x: jax.Array) -> None:
        grad = jax.grad(lambda w: jnp.mean((w - x) ** 2))(weight[...])
        weight[...] -= dj.get_replica_context().all_reduce("sum", grad)

    def under(verify: Any) -> None:
        options = dj.RunOptions(verify=verify)
        (batch,) = strategy.distribute_dataset([np.float32([1, 2, 3, 4])])
        coordinator.schedule(lambda x: strategy.run(step, (x,), options=options), args=(batch,))

    with pytest.raises(dj.NotEqualError, match=r"2\.000 = number of replicas"):
        under("auto")
    assert float(weight[...]) == 0.0
    under("off")
    coordinator.join(SECONDS)
    assert float(weight[...]) == 10.0


def test_steps_that_need_other_replicas_are_refused() -> None:
    """Values of all replicas in the middle of a step, a bound of staleness, and padded batches."""
    with pytest.raises(ValueError, match="max_staleness=1 with workers_per_update=2"):
        in_sync(2, max_staleness=1)
    with pytest.raises(ValueError, match="workers_per_update must be an integer >= 1"):
        in_sync(0)
    strategy, coordinator = in_sync(2)

    def normalized(x: jax.Array) -> jax.Array:
        return x - dj.get_replica_context().all_reduce("mean", x.mean())

    def largest(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x.max(), "data")

    batch, last = strategy.distribute_dataset([np.ones(4), np.ones(3)])
    for step in (normalized, largest):
        with pytest.raises(dj.LoweringError, match=r"collective at test_workers_per_update.py:\d+"):
            coordinator.schedule(step, args=(batch,))
    with pytest.raises(dj.PaddingLeakError, match="3 real examples"):
        coordinator.schedule(jnp.sum, args=(last,))
    with pytest.raises(RuntimeError, match="reduce"):
        coordinator.schedule(lambda: strategy.reduce("sum", jnp.ones(()), axis=None))


def test_a_partial_batch_is_divided_as_among_replicas() -> None:
    """Of three examples one worker has two; what a row each is has no padding, and means are of three."""
    strategy, coordinator = in_sync(2)
    _, last = strategy.distribute_dataset([np.ones(4), np.arange(1.0, 4)])

    def step(x: jax.Array) -> Any:
        return dj.get_replica_context().all_reduce("sum", dj.compute_average_loss(x)), 2 * x

    total, (first, second) = coordinator.fetch(coordinator.schedule(step, args=(last,)))
    assert (total, list(first), list(second)) == (2, [2, 4], [6])
