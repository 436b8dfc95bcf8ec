"""Linen: a ``TrainState`` in and out, batch statistics, and a dropout key for each replica.

The reference is the same step as plain Flax code, under ``jax.jit`` and no strategy.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import distribute_jax as dj

DONATED = dj.RunOptions(donate_args=True)
random = np.random.default_rng(0)
X = random.normal(size=(3, 8, 4)).astype(np.float32)
Y = random.integers(0, 3, size=(3, 8))


class Net(nn.Module):
    """A hidden layer with batch norm and dropout."""

    dropout: float = 0.0
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns one row of logits for each row."""
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name, momentum=0.5)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.tanh(x))
        return nn.Dense(3)(x)


class State(TrainState):
    """Everything that a step changes, and the key for its random numbers."""

    batch_stats: Any
    key: jax.Array


def loss_of(params: Any, state: State, x: jax.Array, y: jax.Array, rngs: Any = None) -> Any:
    """A part of the mean loss, and the new statistics of a share."""
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, changed = state.apply_fn(variables, x, True, mutable=["batch_stats"], rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return dj.compute_average_loss(losses), changed["batch_stats"]


def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    """Takes one step on this replica's share of the global batch."""
    replica = dj.get_replica_context()
    key = jax.random.fold_in(state.key, state.step)
    # Without the replica id every replica would drop the same units.
    rngs = {"dropout": jax.random.fold_in(key, replica.replica_id_in_sync_group)}
    of_params = jax.value_and_grad(loss_of, has_aux=True)
    (loss, stats), grads = of_params(state.params, state, x, y, rngs)
    loss, grads = replica.all_reduce("sum", (loss, grads))
    stats = replica.all_reduce("mean", stats)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@jax.jit
def initialise(key: jax.Array, x: jax.Array) -> Any:
    """Weights and statistics; one program is faster than Linen's many."""
    return Net().init(key, x, train=False)


def made(strategy: dj.Strategy | None, **parts: Any) -> State:
    """The state of a model from a fixed seed."""
    with (strategy or dj.get_strategy()).scope():
        variables = initialise(jax.random.key(0), X[0])
        tx = optax.sgd(0.1, momentum=0.9)
        key = jax.random.key(1)
        return State.create(apply_fn=Net(**parts).apply, tx=tx, key=key, **variables)


def batches_of(strategy: dj.Strategy) -> list[Any]:
    """The three batches, distributed."""
    return list(strategy.distribute_dataset(list(zip(X, Y, strict=True))))


def arrays_of(state: State) -> list[jax.Array]:
    """All that a step changes, and the bits of the key."""
    return jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))


@pytest.mark.exhaustive
def test_a_train_state_trains_as_on_one_device_and_the_old_ones_are_gone(strategy: dj.Strategy):
    """Three steps with synchronised batch norm: weights, momentum, statistics, step, key and loss."""
    state, losses = made(strategy, axis_name="data"), []
    for batch in batches_of(strategy):
        old = state
        state, loss = strategy.run(train_step, args=(old, *batch), options=DONATED)
        losses.append(float(loss))
        changed = (old.params, old.opt_state, old.batch_stats)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(changed))
    assert type(state) is State
    dj.check_in_sync(state)
    one, plain = made(None), jax.jit(train_step)
    for i in range(3):
        one, loss = plain(one, X[i], Y[i])
        assert losses[i] == pytest.approx(float(loss), rel=1e-5)
    for a, b in zip(arrays_of(state), arrays_of(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    with pytest.raises(dj.DonatedError, match=r"args\[0\]\.params\['Dense_0'\]\['kernel'\]"):
        strategy.run(train_step, args=(old, *batch), options=DONATED)
    kept = dj.snapshot(state)
    strategy.run(train_step, args=(state, *batch), options=DONATED)
    assert int(kept.step) == int(strategy.run(train_step, args=(kept, *batch))[0].step) - 1 == 3


def test_statistics_are_the_means_of_those_of_the_shares(strategy: dj.Strategy):
    """Without synchronisation: half the old, and half the mean over the replicas of their own."""
    state, batch = made(strategy), batches_of(strategy)[0]
    layer = state.params["Dense_0"]
    hidden = X[0] @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    shares = hidden.reshape(strategy.num_replicas_in_sync, -1, 16)
    state, _ = strategy.run(train_step, args=(state, *batch))
    found = state.batch_stats["BatchNorm_0"]
    np.testing.assert_allclose(found["mean"], hidden.mean(0) / 2, rtol=1e-4, atol=1e-6)
    wanted = 0.5 + shares.var(axis=1).mean(axis=0) / 2
    np.testing.assert_allclose(found["var"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_statistics_of_the_shares_are_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, axis_name: str | None
):
    """A step with them is not exactly that of one device."""
    state, batch = made(s4, axis_name=axis_name), batches_of(s4)[0]
    s4.run(train_step, args=(state, *batch))
    texts = [record.getMessage() for record in caplog.records]
    logged = ['make nn.BatchNorm with axis_name="data"' in text for text in texts]
    assert any(logged) == (axis_name is None), texts


# Dropout


def dropped(state: State, x: jax.Array, *, own: bool = True) -> jax.Array:
    """Which units this replica drops, with a key that knows the replica or does not."""
    key = jax.random.fold_in(state.key, state.step)
    if own:
        key = jax.random.fold_in(key, dj.get_replica_context().replica_id_in_sync_group)
    layer = nn.Dropout(0.5, deterministic=False)
    return layer.apply({}, jnp.ones((x.shape[0], 16)), rngs={"dropout": key}) == 0


@pytest.mark.exhaustive
def test_each_replica_drops_other_units_and_each_step_others_again(s4: dj.MirroredStrategy):
    """Only with the replica's id folded into the key; the same state draws the same again."""
    state, (first, *_) = made(s4), batches_of(s4)

    def masks(step: int, *, own: bool) -> list[bytes]:
        at = state.replace(step=step)
        drawn = s4.run(functools.partial(dropped, own=own), args=(at, first[0]))
        return [np.asarray(mask).tobytes() for mask in s4.experimental_local_results(drawn)]

    own = masks(0, own=True)
    assert len(set(own)) == 4
    assert masks(0, own=True) == own
    assert not set(masks(1, own=True)) & set(own)
    assert len(set(masks(0, own=False))) == 1


@pytest.mark.exhaustive
def test_training_with_dropout_stays_in_sync_and_can_be_repeated(s4: dj.MirroredStrategy):
    """The replicas drop different units and still agree to the last bit; a second run as well."""
    ends = []
    for _ in range(2):
        state = made(s4, dropout=0.5)
        for batch in batches_of(s4):
            state, _ = s4.run(train_step, args=(state, *batch), options=DONATED)
        dj.check_in_sync(state)
        ends.append(state)
    for a, b in zip(*map(arrays_of, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    without = made(s4)
    for batch in batches_of(s4):
        without, _ = s4.run(train_step, args=(without, *batch))
    kernels = [end.params["Dense_1"]["kernel"] for end in (ends[0], without)]
    assert not np.allclose(*kernels, rtol=1e-2)


# What is refused


def loose_step(
    state: State, x: jax.Array, y: jax.Array, *, grads: bool = False, stats: str = "in the state"
) -> Any:
    """A step that leaves the gradients or the statistics as they are on this replica."""
    gradients, changed = jax.grad(loss_of, has_aux=True)(state.params, state, x, y)
    if grads:
        gradients = dj.get_replica_context().all_reduce("sum", gradients)
    state = state.apply_gradients(grads=gradients)
    if stats == "in the state":
        return state.replace(batch_stats=changed)
    return (state, changed) if stats == "beside it" else state


def test_unreduced_gradients_in_a_train_state_are_refused_by_name(s4: dj.MirroredStrategy):
    """Weights and momentum are listed, with the cure; the state was not donated."""
    state, (batch, *_) = made(s4), batches_of(s4)
    step = functools.partial(loose_step, stats="left out")
    with pytest.raises(dj.OutOfSyncError) as caught:
        s4.run(step, args=(state, *batch), options=DONATED)
    message = str(caught.value)
    assert "result.params['Dense_0']['kernel'] depends on args[1], args[2]" in message
    assert "result.opt_state" in message or "… and" in message
    assert "batch_stats'" not in message
    assert 'grads = dj.get_replica_context().all_reduce("sum", grads)' in message
    kept = jax.tree.leaves((state.params, state.opt_state, state.batch_stats))
    assert not any(array.is_deleted() for array in kept)


@pytest.mark.exhaustive
def test_unreduced_statistics_in_a_train_state_are_refused_by_name(s4: dj.MirroredStrategy):
    """With the gradients summed and the statistics forgotten, only these are named."""
    state, (batch, *_) = made(s4), batches_of(s4)
    with pytest.raises(dj.OutOfSyncError) as caught:
        s4.run(functools.partial(loose_step, grads=True), args=(state, *batch))
    message = str(caught.value)
    assert "result.batch_stats['BatchNorm_0']['mean'] depends on args[1]" in message
    assert "result.params" not in message
    assert 'all_reduce("mean", batch_stats)' in message


@pytest.mark.exhaustive
def test_statistics_of_each_replica_say_how_to_become_one(s4: dj.MirroredStrategy):
    """Returned beside the state they are ``PerReplica``: Flax refuses them, ``reduce`` averages them.

    Given back to ``run`` each replica gets its own; the weights beside them are watched as before.
    """
    state, (batch, *_) = made(s4), batches_of(s4)
    step = functools.partial(loose_step, grads=True, stats="beside it")
    state, stats = s4.run(step, args=(state, *batch))
    assert isinstance(stats["BatchNorm_0"]["mean"], dj.PerReplica)
    with pytest.raises(dj.PerReplicaError, match=r"strategy\.reduce\('mean'"):
        Net().apply({"params": state.params, "batch_stats": stats}, X[0], train=False)
    own = state.replace(batch_stats=stats)
    again, _ = s4.run(step, args=(own, *batch))
    assert isinstance(again.params["Dense_0"]["kernel"], jax.Array)
    with pytest.raises(dj.OutOfSyncError, match=r"result\.params\['Dense_0'\]\['kernel'\]"):
        s4.run(functools.partial(loose_step, stats="in the state"), args=(own, *batch))
    s4.run(functools.partial(loose_step, grads=True), args=(own, *batch))
    averaged = s4.reduce("mean", stats, axis=None)
    out = Net().apply({"params": state.params, "batch_stats": averaged}, X[0], train=False)
    assert np.isfinite(out).all()


def test_a_module_that_is_called_without_weights_says_how_to_hold_them(s2: dj.MirroredStrategy):
    """Flax's error speaks of an unbound module."""
    with pytest.raises(dj.ArgumentError, match=r"module\.apply\(variables, x\).*sample_input"):
        s2.run(lambda x: nn.Dense(2)(x), args=(jnp.zeros((4, 3)),))
