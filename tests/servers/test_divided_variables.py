"""Variables that a partitioner divides among several servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_same_bits

import distribute_jax as dj

P = dj.experimental.partitioners
SECONDS = 60


class Table(nnx.Module):
    """An embedding of 13 rows and a layer."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(13, 8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.embed(ids))


def made(strategy: dj.Strategy, tx: Any) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """The model and its optimizer, a training step, and an evaluation."""
    with strategy.scope():
        model = Table()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_of(model: Any, ids: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(ids), ids % 3)
        return dj.compute_average_loss(losses)

    def step(ids: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, ids)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    return (model, optimizer), step, lambda ids: loss_of(model, ids)


def train(strategy: dj.Strategy, tx: Any, steps: int = 3) -> tuple[Any, list[Any]]:
    """Trains, with an evaluation before each step; returns what was trained, and losses and state."""
    state, step, evaluate = made(strategy, tx)
    results, run = [], strategy.run
    if isinstance(strategy, dj.ParameterServerStrategy):
        run = dj.coordinator.ClusterCoordinator(strategy).schedule
    for ids in np.random.default_rng(0).integers(0, 13, (steps, 16)).astype(np.int32):
        results += [run(fn, args=(ids,)) for fn in (evaluate, step)]
    if run != strategy.run:
        coordinator = dj.coordinator.ClusterCoordinator(strategy)
        coordinator.join(SECONDS)
        results = coordinator.fetch(results)
    return state, [*map(np.asarray, results), *leaves(state)]


def leaves(state: Any) -> list[np.ndarray]:
    """All arrays of models and optimizers."""
    return [*map(np.asarray, jax.tree.leaves(nnx.to_pure_dict(nnx.state(state))))]


def of_servers(servers: int, partitioner: Any = None) -> dj.ParameterServerStrategy:
    """A strategy of one worker that divides what has two rows or more."""
    partitioner = partitioner or P.FixedShardsPartitioner(8)
    return dj.ParameterServerStrategy(
        None, partitioner, workers=1, servers=servers, max_staleness=0
    )


def by_row(update: jax.Array, params: Any = None) -> jax.Array:
    """Halves the rows of an update of which the largest element, or the sum, is large."""
    if update.ndim == 1:
        return update
    largest = jnp.squeeze(jnp.abs(update.reshape(update.shape[0], -1, 1)).max(1, keepdims=True), 1)
    return jnp.where((largest > 4) | ((update > 0).sum(1)[:, None] > 2), update / 2, update)


OPTIMIZERS = {
    # Its gradients are whole numbers, so that no sum depends on how XLA fuses it.
    "by row": optax.chain(
        optax.stateless_with_tree_map(lambda g, _: jnp.round(g * 256)),
        optax.trace(0.5),
        optax.stateless_with_tree_map(by_row),
        optax.scale(-1 / 1024),
    ),
    "adam": optax.adam(0.1),
    "clip+adagrad": optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1)),
    "lamb": optax.lamb(0.1),
}


@pytest.mark.parametrize("name", [name if name == "by row" else long(name) for name in OPTIMIZERS])
def test_divided_variables_have_the_bits_of_one_device(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each server has some rows, with those of the moments; what an update needs whole is not divided."""
    _, wanted = train(dj.OneDeviceStrategy("cpu:0"), OPTIMIZERS[name])
    strategy = of_servers(3)
    _, got = train(strategy, OPTIMIZERS[name])
    assert_same_bits(wanted, got)
    stored = [
        sorted(x.shape for x in store.state.values()) for store in strategy._coordinator.stores
    ]
    tables = [sum(shape[1:] == (8,) for shape in shapes) for shapes in stored]
    if name == "lamb":
        assert sorted(tables) == [0, 0, 3]
        assert "do not divide model.embed.embedding: its update needs" in caplog.text
        assert "whole at test_divided_variables.py" in caplog.text
    else:
        moments = {"adam": 2, "clip+adagrad": 1, "by row": 1}[name]
        assert tables == [1 + moments] * 3
        assert [(rows, 8) in shapes for rows, shapes in zip((5, 4, 4), stored, strict=True)]


def test_a_value_of_all_rows_is_used_by_variables_that_are_divided_otherwise() -> None:
    """Two variables have other numbers of parts, and of the parts of a third a batch looks up rows."""

    def trained(strategy: dj.Strategy, run: Callable[..., Any]) -> list[np.ndarray]:
        with strategy.scope():
            shapes = ((20, 4), (20, 8), (5000, 8), (5000, 8))
            thin, wide, table, counts = state = [nnx.Param(jnp.ones(shape)) for shape in shapes]

        def step(ids: jax.Array) -> None:
            grads = jax.grad(lambda table: (table[ids] ** 2).sum())(table[...])
            x, grads = dj.get_replica_context().all_reduce("sum", (ids[:20] * 1.0, grads))
            thin[...] -= x[:, None]
            wide[...] += x[:, None]
            table[...] -= grads * counts[...] * jnp.arange(5000.0)[:, None]
            counts[...] += grads

        for seed in range(2):
            run(step, args=(np.random.default_rng(seed).integers(0, 5000, 64),))
        if isinstance(strategy, dj.ParameterServerStrategy):
            dj.coordinator.ClusterCoordinator(strategy).join(SECONDS)
        return leaves(state)

    one = dj.OneDeviceStrategy("cpu:0")
    strategy = of_servers(3, lambda shape, **_: [2 if shape == (20, 4) else 3, 1])
    coordinator = dj.coordinator.ClusterCoordinator(strategy)
    assert_same_bits(trained(one, one.run), trained(strategy, coordinator.schedule))
    rows = sorted(len(x) for s in strategy._coordinator.stores for x in s.state.values())
    assert rows == [6, 7, 7, 10, 10, 1666, 1666, 1667, 1667, 1667, 1667]


def test_a_divided_variable_is_read_and_written_as_numpy_does() -> None:
    """Rows in the order that was asked for, new dims, steps, masks; writes of all kinds reach the servers."""
    strategy, expected = of_servers(4), np.arange(20.0, dtype=np.float32).reshape(10, 2)
    coordinator = dj.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = dj.Variable(expected, aggregation=dj.VariableAggregation.SUM)

    def step(ids: jax.Array, x: jax.Array) -> None:
        table.scatter_add(ids, x)

    def add(ids: list[int], x: float) -> None:
        coordinator.schedule(
            step, args=(np.asarray(ids, np.int32), np.full((len(ids), 2), x, np.float32))
        )
        coordinator.join(SECONDS)
        np.add.at(expected, ids, x)

    add([4, 0, 4], 0.5)
    lengths = [len(x) for store in strategy._coordinator.stores for x in store.state.values()]
    assert lengths == [3, 3, 2, 2]
    for write, change in (("assign_add", 1.0), ("assign_sub", 2.0)):
        getattr(table, write)(np.full((10, 2), change, np.float32))
        expected += change if write == "assign_add" else -change
        add([9, 1, 3], 0.25)
    table.scatter_sub([3, 3], np.ones((2, 2), np.float32))
    np.subtract.at(expected, [3, 3], 1.0)
    add([], 1.0)
    mask = np.arange(10) % 3 == 1
    for index in ([4, 0, 3], np.s_[None, 1:3], -1, np.s_[::3], mask, np.s_[2:4, 1], ...):
        read = np.asarray(table[np.asarray(index) if isinstance(index, list) else index])
        np.testing.assert_array_equal(read, expected[index])
    with pytest.raises(IndexError):
        table.numpy()[10]


@pytest.mark.exhaustive
def test_a_checkpoint_of_parts_is_restored_into_any_number_of_servers(tmp_path: Path) -> None:
    """Of four parts into 1 and 3 servers, and under another strategy, where training goes on."""
    state, _ = train(of_servers(4), OPTIMIZERS["adam"], steps=1)
    manager, ids = dj.CheckpointManager(tmp_path), np.arange(16, dtype=np.int32) % 13
    manager.save(0, state)
    ends = []
    for strategy in (*map(of_servers, (1, 3)), dj.OneDeviceStrategy("cpu:0")):
        again, step, _ = made(strategy, OPTIMIZERS["adam"])
        manager.restore(0, again)
        assert_same_bits(leaves(state), leaves(again))
        if isinstance(strategy, dj.OneDeviceStrategy):
            strategy.run(step, args=(ids,))
        elif len(strategy._coordinator.stores) == 3:
            coordinator = dj.coordinator.ClusterCoordinator(strategy)
            coordinator.schedule(step, args=(ids,))
            coordinator.join(SECONDS)
        else:
            continue
        ends.append(leaves(again))
    assert_same_bits(*ends)


@pytest.mark.parametrize("parts", [None, [], [0, 1], [2, 2], [1, 2], [2], [2.0, 1], "21"])
def test_a_partitioner_returns_a_number_for_each_dim(parts: Any) -> None:
    """Of which only the first is more than one; what it returned and the variable are named."""
    strategy = of_servers(2, lambda shape, dtype: parts)
    with strategy.scope():
        table = dj.Variable(np.zeros((13, 8)), aggregation=dj.VariableAggregation.SUM)
    with pytest.raises(ValueError, match=r"returned .* for table of shape \(13, 8\)"):
        dj.coordinator.ClusterCoordinator(strategy).schedule(lambda: table.assign_add(table + 1))
    with pytest.raises(TypeError, match="variable_partitioner must be None or a function; got 3"):
        dj.ParameterServerStrategy(variable_partitioner=3)
