"""Sharding of state that a step takes as arguments and returns, such as Linen's ``TrainState``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec
from leaves import assert_close

import distribute_jax as dj

ROWS = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)


class Perceptron(linen.Module):
    """Two layers that reconstruct their input."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(64)(linen.relu(linen.Dense(256)(x)))


def state() -> TrainState:
    model, tx = Perceptron(), optax.sgd(0.1, momentum=0.9)
    params = model.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def update(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    """The step of one replica."""

    def loss_of(params: Any) -> jax.Array:
        return dj.compute_average_loss(((state.apply_fn({"params": params}, x) - x) ** 2).mean(-1))

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    total, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
    return state.apply_gradients(grads=grads), total


def trained(strategy: dj.Strategy) -> tuple[TrainState, list[float]]:
    """Returns the state after three steps, the last on a partial batch, and the losses."""
    now, losses = strategy.create(state), []
    for batch in strategy.distribute_dataset(dj.data.from_arrays(ROWS).batch(200)):
        now, loss = strategy.run(update, args=(now, batch))
        losses.append(float(loss))
    return now, losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(("replicas", "shard_over"), [(2, None), (4, None), (8, None), (8, 4)])
def test_a_train_state_stays_sharded_and_equals_a_mirrored_one(
    replicas: int, shard_over: int | None
) -> None:
    """The same bits, but for sums in groups, which have another order."""
    strategy = dj.FullyShardedStrategy(list(range(replicas)), shard_over=shard_over)
    mirrored = dj.MirroredStrategy(list(range(replicas)))
    (ours, losses), (whole, theirs) = trained(strategy), trained(mirrored)
    tolerance = 1e-5 if shard_over else 0
    leaves = jax.tree.leaves((losses, ours.params)), jax.tree.leaves((theirs, whole.params))
    assert_close(*leaves, rtol=tolerance, atol=tolerance / 10)
    axis = "shard" if shard_over else "data"
    for tree in (ours.params, ours.opt_state[0].trace):
        assert tree["Dense_0"]["kernel"].sharding.spec == PartitionSpec(axis)
        assert tree["Dense_1"]["kernel"].sharding.spec == PartitionSpec(None, axis)
    assert strategy._runner.programs() == mirrored._runner.programs()
    plan = strategy.plan(update, args=(ours, jnp.asarray(ROWS)))
    size = sum(x.nbytes for x in jax.tree.leaves(whole) if hasattr(x, "nbytes"))
    assert plan.argument_bytes < 1.1 * size / (shard_over or replicas) + ROWS.nbytes


@pytest.mark.exhaustive
def test_rules_shard_a_train_state() -> None:
    rules = {r"Dense_0.kernel": PartitionSpec(None, "model")}
    ours, losses = trained(dj.ModelParallelStrategy([0, 1, 2, 3], model=2, rules=rules))
    for kernel in (ours.params["Dense_0"]["kernel"], ours.opt_state[0].trace["Dense_0"]["kernel"]):
        assert kernel.sharding.spec == PartitionSpec("data", "model")
    one, theirs = trained(dj.OneDeviceStrategy("cpu:0"))
    np.testing.assert_allclose(losses, theirs, rtol=1e-6)
    assert_close(ours.params, one.params, atol=1e-6)


def test_rules_leave_factored_moments_whole() -> None:
    """Optax keeps them under the names of parameters, which rules must fit."""
    tx, spec = optax.adafactor(0.1, min_dim_size_to_factor=8), PartitionSpec("model", None)

    def made(rule: str) -> TrainState:
        strategy = dj.ModelParallelStrategy([0, 1], model=2, rules={rule: spec})
        return strategy.create(
            lambda: TrainState.create(apply_fn=None, params=state().params, tx=tx)
        )

    ours = made("Dense_0.kernel")
    assert ours.params["Dense_0"]["kernel"].sharding.spec == PartitionSpec("model")
    assert ours.opt_state[0].v_row["Dense_0"]["kernel"].is_fully_replicated
    with pytest.raises(dj.ArgumentError, match=r"Dense_0.bias has the shape \[64\]"):
        made("Dense_0.bias")


@pytest.mark.exhaustive
def test_a_replicated_train_state_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    strategy = dj.FullyShardedStrategy([0, 1])
    now, _ = strategy.run(update, args=(state(), jnp.asarray(ROWS)))
    assert now.params["Dense_0"]["kernel"].sharding.is_fully_replicated
    assert "args[0].params['Dense_0']['kernel']" in caplog.text
    assert "strategy.create(lambda: TrainState.create(...))" in caplog.text
    caplog.clear()
    strategy.run(update, args=(strategy.create(state), jnp.asarray(ROWS)))
    assert "strategy.create" not in caplog.text


@pytest.mark.parametrize("state_last", [False, True])
def test_a_returned_nnx_state_stays_sharded(state_last: bool) -> None:
    strategy = dj.FullyShardedStrategy([0, 1])
    with strategy.scope():
        graphdef, state = nnx.split(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    kernel = np.array(state["kernel"][...])

    def step(state: nnx.State, x: jax.Array) -> nnx.State:
        grads = dj.get_replica_context().all_reduce(
            "sum",
            jax.grad(
                lambda state: dj.compute_average_loss(
                    nnx.merge(graphdef, state, copy=True)(x)[:, 0]
                )
            )(state),
        )
        return jax.tree.map(lambda old, grad: old - grad, state, grads)

    (batch,) = strategy.distribute_dataset([ROWS[:8]])
    for _ in range(2):
        args = (batch, state) if state_last else (state, batch)
        state = strategy.run((lambda x, s: step(s, x)) if state_last else step, args=args)
    assert state["kernel"][...].sharding.spec == PartitionSpec(None, "data")
    kernel[:, 0] -= 2 * ROWS[:8].mean(0)
    np.testing.assert_allclose(state["kernel"][...], kernel, atol=1e-5)


def test_pmap_refuses_sharded_arguments() -> None:
    strategy = dj.FullyShardedStrategy([0, 1])
    options = dj.RunOptions(lowering="pmap")
    weights = strategy.create(lambda: jnp.ones((64, 64)))
    assert not weights.is_fully_replicated
    with pytest.raises(dj.LoweringError, match="replicates all state"):
        strategy.run(lambda weights: weights * 2, args=(weights,), options=options)
