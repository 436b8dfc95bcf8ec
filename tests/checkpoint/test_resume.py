"""An interrupted training run continues as if uninterrupted: data, random numbers, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import numbers

import distribute_jax as dj
from distribute_jax.checkpoint import load, save

ROWS, BATCH, STEPS = 48, 8, 20
"""An epoch has 6 batches, so that the training ends in the fourth."""


class Network(nnx.Module):
    """A layer with dropout, and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns one number for each row."""
        return self.norm(self.dropout(self.linear(x))).sum(1)


def step(model: Network, optimizer: nnx.Optimizer, loss: nnx.Metric, batch: Any) -> Any:
    """A step of Adam; returns the ids of the examples."""
    value, grads = nnx.value_and_grad(
        lambda model: dj.compute_average_loss((model(batch["x"]) - batch["id"]) ** 2)
    )(model)
    value, grads = dj.get_replica_context().all_reduce("sum", (value, grads))
    optimizer.update(model, grads)
    loss.update(values=value)
    return batch["id"]


def columns() -> dict[str, np.ndarray]:
    """Examples that carry their number."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "id": np.arange(ROWS, dtype=np.float32)}


def from_arrays() -> Any:
    """Arrays, shuffled in each epoch."""
    return dj.data.from_arrays(columns()).shuffle(seed=3).batch(BATCH)


def from_grain() -> Any:
    """The same examples through Grain."""
    data = columns()
    rows = [{name: column[i] for name, column in data.items()} for i in range(ROWS)]
    return grain.MapDataset.source(rows).seed(5).shuffle().batch(BATCH)


SOURCES: dict[str, Callable[[], Any]] = {"arrays": from_arrays, "grain": from_grain}


class Run:
    """A complete training state, created as a new process would create it."""

    def __init__(self, strategy: dj.Strategy, source: Callable[[], Any]) -> None:
        self.strategy = strategy
        with strategy.scope():
            model = Network(nnx.Rngs(0, dropout=1))
            self.tree: dict[str, Any] = {
                "model": model,
                "optimizer": nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param),
                "loss": nnx.metrics.Average(),
            }
        self.dataset = strategy.distribute_dataset(source())
        self.tree["data"] = iter(self.dataset)

    def batches(self) -> Iterator[Any]:
        """One epoch after another, without end."""
        while True:
            yield from self.tree["data"]
            self.tree["data"] = iter(self.dataset)

    def go(self, steps: int) -> list[list[float]]:
        """Trains some steps; returns the numbers of the examples that each saw."""
        objects = tuple(self.tree[name] for name in ("model", "optimizer", "loss"))
        seen, batches = [], self.batches()
        for _ in range(steps):
            ids = self.strategy.run(step, args=(*objects, next(batches)))
            local = self.strategy.experimental_local_results(ids)
            seen.append(np.concatenate([np.asarray(part) for part in local]).tolist())
        return seen

    def state(self) -> Any:
        """All numbers, to be compared bit by bit."""
        rest = {name: value for name, value in self.tree.items() if name != "data"}
        return numbers(rest)


@pytest.mark.parametrize(
    ("source", "replicas"),
    [
        ("grain", 4),
        *(long("arrays", n) for n in (1, 2, 4, 8)),
        *(long("grain", n) for n in (1, 2, 8)),
    ],
)
def test_an_interrupted_training_run_equals_an_uninterrupted_one_bitwise(
    source: str, replicas: int, tmp_path: Path
) -> None:
    """Interrupted anywhere, also at the end of an epoch: it continues at the next example."""
    strategy = dj.MirroredStrategy(range(replicas))
    whole, seen = Run(strategy, SOURCES[source]), []
    cuts = (0, 4, 6, 17) if replicas == 4 else range(STEPS)
    with dj.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for i in range(STEPS):
            if i in cuts:
                manager.save(i, whole.tree)
            seen += whole.go(1)
    for epoch in (seen[:6], seen[6:12], seen[12:18]):
        assert sorted(chain(*epoch)) == list(range(ROWS)), "each example once"
    assert seen[6:12] != seen[:6], "in another order in the next epoch"
    second = Run(strategy, SOURCES[source])
    for cut in cuts:
        second.go(1)  # what it did before does not matter
        assert manager.restore(cut, second.tree) is second.tree
        assert second.go(STEPS - cut) == seen[cut:]
        assert all(map(np.array_equal, second.state(), whole.state()))


def test_examples_continue_on_another_number_of_replicas(tmp_path: Path) -> None:
    """Each once in the epoch, in the order of an uninterrupted pass."""

    def ids(replicas: int) -> Any:
        strategy = dj.MirroredStrategy(range(replicas))
        iterator = iter(strategy.distribute_dataset(from_arrays()))
        local = strategy.experimental_local_results
        return iterator, lambda: np.concatenate(local(next(iterator)["id"])).tolist()

    (one, next_one), (four, next_four) = ids(1), ids(4)
    seen = [next_one() for _ in range(2)]
    save(tmp_path / "c", {"data": one})
    load(tmp_path / "c", {"data": four})
    seen += [next_four() for _ in range(4)]
    assert sorted(chain(*seen)) == list(range(ROWS))
    assert seen[2:] == [next_one() for _ in range(4)]


def test_random_streams_continue(tmp_path: Path) -> None:
    """Typed and raw keys, and each stream of ``Rngs``."""
    rngs = nnx.Rngs(0, dropout=1)
    tree = {"rngs": rngs, "key": jax.random.key(3), "raw": jax.random.PRNGKey(4)}
    for _ in range(3):
        rngs.params()
        rngs.dropout()
    tree["key"], _ = jax.random.split(tree["key"])
    with dj.CheckpointManager(tmp_path) as manager:
        manager.save(1, tree)
    next_ones = lambda t: [  # noqa: E731
        jax.random.bits(k).item()
        for k in (t["rngs"].params(), t["rngs"].dropout(), t["rngs"].dropout(), t["key"], t["raw"])
    ]
    wanted = next_ones(tree)
    new = {"rngs": nnx.Rngs(7, dropout=8), "key": jax.random.key(0), "raw": jax.random.PRNGKey(0)}
    manager.restore_latest(new)
    assert next_ones(new) == wanted
