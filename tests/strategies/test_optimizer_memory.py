"""``optimizer_memory_kind`` stores optimizer state in another memory between steps, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import distribute_jax as dj

KIND = "pinned_host"
X = np.random.default_rng(0).normal(size=(14, 64)).astype(np.float32)
RULES = {"kernel": PartitionSpec(None, "model")}

STRATEGIES: dict[str, Callable[..., dj.Strategy]] = {
    "mirrored": lambda **kind: dj.MirroredStrategy([0, 1, 2, 3], **kind),
    "fully sharded": lambda **kind: dj.FullyShardedStrategy([0, 1, 2, 3], **kind),
    "rules": lambda **kind: dj.ModelParallelStrategy([0, 1, 2, 3], model=2, rules=RULES, **kind),
    "one device": lambda **kind: dj.OneDeviceStrategy("cpu:0", **kind),
    "sharded update": lambda **kind: dj.MirroredStrategy(
        [0, 1], shard_optimizer_state=True, **kind
    ),
    "replicas in turn": lambda **kind: dj.MirroredStrategy([0, 1], replicas_per_device=2, **kind),
    "in groups": lambda **kind: dj.FullyShardedStrategy(shard_over=4, **kind),
}


class Trained:
    """A layer and an optimizer whose moments are large enough to be moved."""

    def __init__(self, strategy: dj.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model, self.optimizer = strategy.create(self.made)
            self.batches = strategy.distribute_dataset([X[:8], X[8:]])

    @staticmethod
    def made() -> tuple[nnx.Linear, dj.Optimizer[Any]]:
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        return model, dj.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(self, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(((model(x) - x) ** 2).mean(axis=1))
        )(self.model)
        self.optimizer.update(self.model, grads)
        return value

    def train(self, **options: Any) -> None:
        for batch in self.batches:
            self.strategy.run(self.step, args=(batch,), options=dj.RunOptions(**options))

    def state(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(nnx.state((self.model, self.optimizer)))]

    def kinds(self) -> list[Any]:
        """Returns the memory kinds of the optimizer's large arrays, and of the model's."""
        return [
            {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(of)) if x.size >= 1024}
            for of in (nnx.state(self.optimizer, nnx.OptState), self.model)
        ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STRATEGIES)
def test_optimizer_state_stays_in_that_memory_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """It is in that memory after create, training, verify, save and restore."""
    usual = Trained(STRATEGIES[name]())
    moved = Trained(STRATEGIES[name](optimizer_memory_kind=KIND))
    assert moved.kinds() == [{KIND}, {"device"}]
    usual.train()
    moved.train(verify="first")
    assert moved.kinds() == [{KIND}, {"device"}]
    saved = moved.state()
    assert all(map(np.array_equal, usual.state(), saved))

    tree = {"model": moved.model, "optimizer": moved.optimizer}
    manager = dj.CheckpointManager(tmp_path)
    manager.save(1, tree)
    manager.wait()
    moved.train()
    manager.restore(1, tree)
    assert moved.kinds() == [{KIND}, {"device"}]
    assert all(map(np.array_equal, saved, moved.state()))


def test_the_placement_shows_the_memory_and_small_arrays_are_not_moved() -> None:
    strategy = dj.FullyShardedStrategy([0, 1], optimizer_memory_kind=KIND)
    why = {row.path: row.why for row in strategy.placement(Trained.made())}
    moved = {path: text for path, text in why.items() if KIND in text}
    assert list(moved) == ["opt_state[0].mu.kernel", "opt_state[0].nu.kernel"]
    assert set(moved.values()) == {"dim 1 is divided among 2 replicas, in pinned_host"}
    others = dj.MirroredStrategy([0]).placement(Trained.made())
    assert not any(KIND in row.why for row in others)


def test_a_flipped_bit_in_that_memory_is_found() -> None:
    """The replicas' copies in that memory are compared too."""
    trained = Trained(dj.MirroredStrategy([0, 1, 2], optimizer_memory_kind=KIND))
    trained.strategy.run(trained.step, args=(next(iter(trained.batches)),))
    dj.check_in_sync(trained.optimizer)
    variable = trained.optimizer.opt_state[0].mu["kernel"]
    array = variable.get_raw_value()
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[1].view(np.uint32)[3, 5] ^= 1
    places = [shard.data.sharding for shard in array.addressable_shards]
    flipped = [jax.device_put(part, to) for part, to in zip(parts, places, strict=True)]
    variable.set_raw_value(
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, flipped)
    )
    with pytest.raises(dj.OutOfSyncError, match="mu"):
        dj.check_in_sync(trained.optimizer)


def test_an_unknown_memory_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"optimizer_memory_kind on .*'pinned_host'"):
        dj.MirroredStrategy([0], optimizer_memory_kind="host")
