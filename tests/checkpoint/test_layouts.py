"""A checkpoint of one strategy is restored by another: one value for each variable."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import numbers

import distribute_jax as dj
from distribute_jax.checkpoint import load, save

SUM, MEAN = dj.VariableAggregation.SUM, dj.VariableAggregation.MEAN
FIRST = dj.VariableAggregation.ONLY_FIRST_REPLICA
NONE = dj.VariableAggregation.NONE
ON_READ = dj.VariableSynchronization.ON_READ


def made(strategy: dj.Strategy, value: Any, aggregation: Any, **kinds: Any) -> dj.Variable:
    """A variable of a strategy."""
    with strategy.scope():
        return dj.Variable(value, aggregation=aggregation, name="v", **kinds)


def four_and_three(
    strategy: dj.Strategy, aggregation: Any, dtype: Any = jnp.float32
) -> dj.Variable:
    """An ON_READ variable with the components 4 and 3."""
    variable = made(strategy, jnp.zeros((), dtype), aggregation, synchronization=ON_READ)
    own = lambda: 4 - dj.get_replica_context().replica_id_in_sync_group  # noqa: E731
    strategy.run(lambda: variable.assign(jnp.asarray(own(), dtype)))
    assert [float(v) for v in variable.values] == [4, 3]
    return variable


COMPONENTS = {
    "SUM": (SUM, 7.0, {1: [7.0], 2: [3.5, 3.5], 4: [1.75] * 4}),
    "MEAN": (MEAN, 3.5, {1: [3.5], 2: [3.5] * 2, 4: [3.5] * 4}),
    "FIRST": (FIRST, 4.0, {1: [4.0], 2: [4.0] * 2, 4: [4.0] * 4}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", COMPONENTS)
def test_on_read_variables_are_saved_as_they_read(
    kind: str, s2: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """4 and 3 are 7.0, 3.5 or 4.0; a sum is divided among the replicas."""
    aggregation, value, wanted = COMPONENTS[kind]
    variable = four_and_three(s2, aggregation)
    save(tmp_path / "c", {"v": variable})
    load(tmp_path / "c", {"v": (one := nnx.Variable(jnp.zeros(())))})
    assert one[...] == value
    for replicas, components in wanted.items():
        other = dj.MirroredStrategy(range(replicas))
        target = made(other, 0.0, aggregation, synchronization=ON_READ)
        load(tmp_path / "c", {"v": target})
        assert [float(v) for v in target.values] == components
        assert float(target[...]) == value
        other.run(lambda target=target: target.assign_add(1.0))
        assert float(target[...]) == value + (replicas if aggregation is SUM else 1)


@pytest.mark.exhaustive
def test_an_integer_sum_that_does_not_divide_keeps_its_remainder_on_replica_0(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """7 into 4 replicas reads as 7 again, which 1 each would not."""
    save(tmp_path / "c", four_and_three(s2, SUM, jnp.int32))
    target = made(s4, 0, SUM, synchronization=ON_READ)
    load(tmp_path / "c", target)
    assert [int(v) for v in target.values] == [4, 1, 1, 1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_on_read_without_aggregation_cannot_be_saved(replicas: int, tmp_path: Path) -> None:
    """A ValueError that names the variable, also for one replica, as in TF."""
    variable = made(dj.MirroredStrategy(range(replicas)), 0.0, NONE, synchronization=ON_READ)
    with pytest.raises(ValueError, match=r"\['v'\]: an ON_READ variable with aggregation=NONE"):
        save(tmp_path / "c", {"v": variable})


STRATEGIES = {
    "default": dj.get_strategy,
    "one": lambda: dj.OneDeviceStrategy("cpu:3"),
    "s1": lambda: dj.MirroredStrategy([0]),
    "s2": lambda: dj.MirroredStrategy([0, 1]),
    "s4": lambda: dj.MirroredStrategy([3, 2, 1, 0]),
    "s8": lambda: dj.MirroredStrategy(range(8)),
    "central": lambda: dj.CentralStorageStrategy([4, 5]),
}


class Model(nnx.Module):
    """One weight that starts at 0.5, as in the worked numbers."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies."""
        return self.w * x


def training(strategy: dj.Strategy) -> dict[str, Any]:
    """A model, its optimizer, and the rest of a training state."""
    with strategy.scope():
        model = Model()
        return {
            "model": model,
            "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param),
            "count": dj.Variable(2.0),
            "rngs": nnx.Rngs(0),
            "params": {"w": jnp.arange(3.0)},
        }


def where(tree: Any) -> list[Any]:
    """Returns the sharding of every array."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return [x.sharding if x.committed else "anywhere" for x in arrays]


@pytest.mark.exhaustive
def test_every_strategy_restores_what_every_other_saved(tmp_path: Path) -> None:
    """Bitwise, with the shardings of the target."""
    for i, name in enumerate(STRATEGIES):
        old = training(STRATEGIES[name]())
        old["model"].w[...] = jnp.asarray(i + 0.1)
        old["count"].assign(i)
        save(tmp_path / name, old)
        for other in STRATEGIES.values():
            new = training(other())
            before = where(new)
            load(tmp_path / name, new)
            assert where(new) == before
            assert all(map(np.array_equal, numbers(new), numbers(old)))


def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """A step of the worked numbers: squared error, plain gradient descent."""
    loss, grads = nnx.value_and_grad(lambda model: dj.compute_average_loss((model(x) - y) ** 2))(
        model
    )
    loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
    optimizer.update(model, grads)
    return loss


X = np.arange(8, dtype=np.float32)


def trainable(strategy: dj.Strategy) -> tuple[Any, Any, Any]:
    """A model, an optimizer with momentum, and a batch."""
    with strategy.scope():
        model = Model()
        optimizer = nnx.Optimizer(model, optax.sgd(0.001, momentum=0.9), wrt=nnx.Param)
    return model, optimizer, next(iter(strategy.distribute_dataset([(X, 3 * X)])))


@pytest.mark.exhaustive
def test_training_goes_on_under_another_strategy(tmp_path: Path) -> None:
    """Two steps, a save and 50 steps under any strategy equal 52 steps on one device."""
    one = dj.OneDeviceStrategy("cpu:0")
    model, optimizer, batch = trainable(one)
    losses = [float(one.run(step, args=(model, optimizer, *batch))) for _ in range(52)]
    two = dj.MirroredStrategy([0, 1])
    model, optimizer, batch = trainable(two)
    for _ in range(2):
        two.run(step, args=(model, optimizer, *batch))
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for other in (one, two, dj.MirroredStrategy([4, 5, 6, 7]), STRATEGIES["central"]()):
        model, optimizer, batch = trainable(other)
        load(tmp_path / "c", {"model": model, "optimizer": optimizer})
        later = [float(other.run(step, args=(model, optimizer, *batch))) for _ in range(50)]
        np.testing.assert_allclose(later, losses[2:], rtol=1e-6)


@pytest.mark.exhaustive
def test_a_restore_replaces_state_that_a_failed_step_has_donated(
    s2: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """As the error of a failed step recommends."""
    model, optimizer, batch = trainable(s2)
    total = made(s2, 3.0, SUM, synchronization=ON_READ)
    tree = {"model": model, "optimizer": optimizer, "total": total}
    save(tmp_path / "c", tree)
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    load(tmp_path / "c", tree)
    assert float(total[...]) == 3.0
    assert np.isfinite(s2.run(step, args=(model, optimizer, *batch)))


def test_the_next_step_does_not_change_what_is_saved(
    s2: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """``save`` returns before the file is written, and the next step donates the arrays."""
    model, optimizer, batch = trainable(s2)
    with dj.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        weights = []
        for i in range(6):
            s2.run(step, args=(model, optimizer, *batch))
            weights.append(float(model.w[...]))
            manager.save(i, {"model": model})
    for i, weight in enumerate(weights):
        manager.restore(i, {"model": model})
        assert float(model.w[...]) == weight
    assert len(set(weights)) == 6


@pytest.mark.exhaustive
def test_a_save_in_another_thread_waits_for_the_step(
    s2: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """All leaves are of one step, although steps donate and replace the arrays all the time."""
    with s2.scope():
        pair = nnx.List([nnx.Param(jnp.zeros(50_000)), nnx.Param(jnp.zeros(50_000))])

    def count() -> None:
        for variable in pair:
            variable[...] += 1

    s2.run(count)
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            s2.run(count)

    thread = threading.Thread(target=train)
    thread.start()
    with dj.CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for i in range(8):
            manager.save(i, {"pair": pair})
    over.set()
    thread.join()
    found = []
    for i in range(8):
        manager.restore(i, {"pair": pair})
        found.append([set(np.asarray(variable[...]).tolist()) for variable in pair])
    assert all(len(first) == 1 and first == second for first, second in found)
    assert found == sorted(found, key=lambda values: max(values[0]))
