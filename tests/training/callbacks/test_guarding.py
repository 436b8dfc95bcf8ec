"""Callbacks that notice bad losses, copies that differ, and devices that compute wrongly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import distribute_jax as dj
from distribute_jax.callbacks import BackupAndRestore, CheckInSync, LambdaCallback, LossSpike


class Net(nnx.Module):
    """A layer and random numbers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.layer = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.layer(x))


def batches(steps: int, spikes: Any = (), size: float = 1000.0) -> list[Any]:
    """Batches of a noisy line, of which some have far too large targets."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(8, 3)).astype("f4") for _ in range(steps)]
    noise = [rng.normal(size=(8, 1)).astype("f4") for _ in range(steps)]
    return [
        (x, (x[:, :1] + n) * (size if i in spikes else 1))
        for i, (x, n) in enumerate(zip(made, noise, strict=True))
    ]


def compiled(strategy: Any = None, module: Callable[[], Any] = Net) -> dj.Model:
    """A model ready for ``fit``."""
    with (strategy or dj.MirroredStrategy([0, 1])).scope():
        model = dj.Model(module())
    model.compile(optax.adam(0.02), loss="mse")
    return model


def fitted(model: dj.Model, data: list[Any], *callbacks: Any) -> list[np.ndarray]:
    """The state after one epoch."""
    model.fit(data, verbose=0, callbacks=list(callbacks))
    return state(model)


def state(model: dj.Model) -> list[np.ndarray]:
    """Weights, random streams and optimizer."""
    parts = nnx.state(model.module), nnx.state(model.optimizer)
    is_key = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, is_key) else x)
        for x in jax.tree.leaves(parts)
    ]


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    """Whether two states are the same bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def test_a_spike_is_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The state is bitwise that without the batch; its gradients were finite."""
    data, guard = batches(14, spikes=[11]), LossSpike(factor=5, window=10)
    with caplog.at_level(logging.WARNING, "distribute_jax"):
        after = fitted(compiled(), data, guard)
    assert guard.spikes == 1
    assert "Step 11 was skipped: the loss is more than 5 times the median" in caplog.text
    without = fitted(compiled(), [*data[:11], *data[12:]], LossSpike(factor=5, window=10))
    assert same(after, without)


def test_a_warning_changes_nothing_and_a_rollback_goes_back() -> None:
    """To the state of the last multiple of the window, a few batches after the spike."""
    data, states = batches(12, spikes=[8]), {}
    warns = LossSpike(factor=5, window=4, policy="warn")
    after = fitted(compiled(), data, warns)
    assert warns.spikes == 1
    never = LossSpike(factor=1e9, window=4, policy="warn")
    assert same(after, fitted(compiled(), data, never))
    assert never.spikes == 0
    model = compiled()
    note = LambdaCallback(on_train_batch_end=lambda batch, _: states.update({batch: state(model)}))
    guard = LossSpike(factor=5, window=4, policy="rollback")
    model.fit(data, verbose=0, callbacks=[note, guard])
    assert guard.spikes == 1
    back = [b for b in range(8, 12) if same(states[7], states[b])]
    assert back == [8]  # skipped at once
    assert same(state(model), states[7])  # looked at after four more, at the latest


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_parameter_servers_skip_and_go_back_as_one_device(policy: str) -> None:
    """Bitwise, although batches after the spike were scheduled when it is seen."""
    data, guards, states = batches(14, spikes=[11]), [], []
    for strategy in (dj.OneDeviceStrategy("cpu:0"), dj.ParameterServerStrategy(max_staleness=0)):
        guards.append(LossSpike(factor=5, window=10, policy=policy))
        states.append(fitted(compiled(strategy), data, guards[-1]))
    assert [guard.spikes for guard in guards] == [1, 1]
    assert same(*states)


def test_a_resumed_training_has_the_window(tmp_path: Path) -> None:
    """The spike is the first batch after the interruption, and is seen."""
    data = batches(14, spikes=[11])

    def stop(batch: int, _: Any) -> None:
        if batch == 10:
            raise KeyboardInterrupt

    def saving() -> BackupAndRestore:
        return BackupAndRestore(tmp_path / "backup", save_freq=11)

    guard, model = LossSpike(factor=5, window=10), compiled()
    with pytest.raises(KeyboardInterrupt):
        fitted(model, data, saving(), guard, LambdaCallback(on_train_batch_end=stop))
    again = LossSpike(factor=5, window=10)
    after = fitted(compiled(), data, saving(), again)
    assert again.spikes == 1
    assert same(after, fitted(compiled(), data, LossSpike(factor=5, window=10)))


def test_no_false_alarm_in_a_thousand_clean_steps() -> None:
    """With the noise of small batches and dropout."""
    guard = LossSpike(window=50)
    fitted(compiled(dj.OneDeviceStrategy("cpu:0")), batches(1000), guard)
    assert guard.spikes == 0


def test_a_window_of_spikes_ends_the_training() -> None:
    """Before it, and after it, nothing was applied."""
    data = batches(12, spikes=range(6, 12))
    model = compiled()
    with pytest.raises(dj.StepsSkippedError, match="4 steps in a row"):
        fitted(model, data, LossSpike(factor=5, window=3))
    assert same(state(model), fitted(compiled(), data[:6], LossSpike(factor=5, window=3)))


def flip(model: dj.Model, where: str, device: int, bit: int) -> str:
    """Flips one bit on one device, of a parameter or of the optimizer; returns the leaf."""
    node = {"module": model.module, "optimizer": model.optimizer}[where]
    named = [
        (".".join(map(str, path)), v)
        for path, v in nnx.iter_graph(node)
        if isinstance(v, nnx.Variable) and v.get_raw_value().dtype == jnp.float32
    ]
    name, variable = named[bit % len(named)]
    array = variable.get_raw_value()
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    words = parts[device].reshape(-1).view(np.uint32)
    words[bit % words.size] ^= np.uint32(1 << bit % 32)
    devices = [shard.device for shard in array.addressable_shards]
    placed = [jax.device_put(x, to) for x, to in zip(parts, devices, strict=True)]
    variable.set_raw_value(
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
    )
    return name.split(".")[-1]


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_found_at_the_next_check_with_leaf_and_device(seed: int) -> None:
    """Of a weight or of the optimizer's state, in the middle of an epoch."""
    found_flips(np.random.default_rng(seed), dj.MirroredStrategy([0, 1, 2, 3]), 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_two_hundred_of_two_hundred_flipped_bits_are_found(replicas: int) -> None:
    """On any device but the first of two, of which none is the odd one."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    found_flips(np.random.default_rng(replicas), strategy, 200)


def found_flips(rng: np.random.Generator, strategy: dj.Strategy, times: int) -> None:
    """Flips a random bit in each of so many runs, and looks for it."""
    data, replicas = batches(5), strategy.num_replicas_in_sync
    model = compiled(strategy)
    for _ in range(times):
        start = dj.snapshot(model.module), dj.snapshot(model.optimizer)
        where = ("module", "optimizer")[rng.integers(2)]
        device, bit = (
            int(rng.integers(1 if replicas == 2 else 0, replicas)),
            int(rng.integers(2**20)),
        )
        leaf = []

        def damage(batch: int, _: Any, at: Any = (where, device, bit), leaf: Any = leaf) -> None:
            if batch == 1:
                leaf.append(flip(model, *at))

        callbacks = [LambdaCallback(on_train_batch_end=damage), CheckInSync(every=2)]
        with pytest.raises(dj.OutOfSyncError) as caught:
            fitted(model, data, *callbacks)
        assert any(
            leaf[0] in line and f": cpu:{device} not as on" in line
            for line in str(caught.value).splitlines()
        )
        nnx.update(model.module, start[0])
        nnx.update(model.optimizer, start[1])


def test_a_flipped_bit_is_healed_by_the_majority_bitwise() -> None:
    """The copies are those of a training in which nothing was flipped; of two copies there is no majority."""

    def run(strategy: dj.Strategy, device: int | None) -> list[np.ndarray]:
        model = compiled(strategy)

        def damage(batch: int, _: Any) -> None:
            if batch == 4 and device is not None:
                flip(model, "module", device, 12345)
                flip(model, "optimizer", device, 54321)

        heals = CheckInSync(every=5, policy="heal")
        after = fitted(model, batches(5), LambdaCallback(on_train_batch_end=damage), heals)
        dj.check_in_sync((model.module, model.optimizer))
        return after

    s3 = dj.MirroredStrategy([0, 1, 2])
    with pytest.warns(RuntimeWarning, match="cpu:1 not as on cpu:0, cpu:2"):
        healed = run(s3, 1)
    assert same(healed, run(s3, None))
    with pytest.raises(dj.OutOfSyncError, match="not the majority"):
        run(dj.MirroredStrategy([0, 1]), 1)


FAULTS: list[int] = []


class Faulty(nnx.Module):
    """A layer whose output is wrong on replica 2 when there is a fault in the list."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        def factor(replica: Any) -> np.float32:
            return np.float32(1 + 1e-6 if int(replica) == 2 and FAULTS and FAULTS.pop() else 1)

        replica = dj.get_replica_context().replica_id_in_sync_group
        wrong = io_callback(factor, jax.ShapeDtypeStruct((), jnp.float32), replica)
        return self.layer(x * jax.lax.stop_gradient(wrong))


def test_a_gradient_that_one_replica_gets_wrong_once_is_found_before_it_is_used() -> None:
    """The replica and the variables are named, and nothing was trained on; clean replays say nothing."""
    model = compiled(dj.MirroredStrategy([0, 1, 2, 3]), Faulty)
    fitted(model, batches(4), dj.callbacks.ReplaySteps(every=2))
    before = state(model)
    FAULTS.append(1)
    with pytest.raises(dj.NotEqualError, match=r"replica 2: layer\.bias, layer\.kernel") as caught:
        fitted(model, batches(4), dj.callbacks.ReplaySteps(every=1))
    assert "replica 1:" not in str(caught.value)
    assert same(state(model), before)


def test_a_saved_step_is_replayed(tmp_path: Path) -> None:
    """The hashes of each replica's gradients are the same on other devices, and with other weights others."""
    model = compiled(dj.MirroredStrategy([0, 1, 2, 3]))
    model.save(tmp_path / "before")
    x, y = batches(1)[0]
    first = dj.testing.replay_step(model, tmp_path / "before", (x, y))
    assert {name: hashes.shape for name, hashes in first.items()} == {
        "layer.bias": (4, 2),
        "layer.kernel": (4, 2),
    }
    fitted(model, batches(3))
    other = compiled(dj.MirroredStrategy([7, 4, 5, 6]))
    again = dj.testing.replay_step(other, tmp_path / "before", (x, y))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    model.save(tmp_path / "after")
    later = dj.testing.replay_step(model, tmp_path / "after", (x, y))
    assert not np.array_equal(first["layer.kernel"], later["layer.kernel"])
