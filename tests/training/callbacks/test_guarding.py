"""Callbacks that detect loss spikes, copies that differ, and devices that compute wrongly."""

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
from cases import long
from flax import nnx
from jax.experimental import io_callback
from leaves import numbers

import distribute_jax as dj
from distribute_jax.callbacks import BackupAndRestore, CheckInSync, LambdaCallback, LossSpike
from tests.training.model_factory import compile_model


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.layer = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.layer(x))


def batches(steps: int, spikes: Any = (), size: float = 1000.0) -> list[Any]:
    """Returns batches of a noisy line; those in ``spikes`` have far too large targets."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(8, 3)).astype("f4") for _ in range(steps)]
    noise = [rng.normal(size=(8, 1)).astype("f4") for _ in range(steps)]
    factors = (size if i in spikes else 1 for i in range(len(made)))
    return [(x, (x[:, :1] + n) * f) for x, n, f in zip(made, noise, factors, strict=True)]


def compiled_model(strategy: Any = None, module: Callable[[], Any] = Net) -> dj.Model:
    strategy = strategy or dj.MirroredStrategy([0, 1])
    return compile_model(strategy, module, optimizer=optax.adam(0.02))


def fit_one_epoch(model: dj.Model, data: list[Any], *callbacks: Any) -> list[np.ndarray]:
    """Returns the state after one epoch."""
    model.fit(data, verbose=0, callbacks=list(callbacks))
    return state(model)


def state(model: dj.Model) -> list[np.ndarray]:
    """Returns weights, random streams and optimizer."""
    return numbers((nnx.state(model.module), nnx.state(model.optimizer)))


def bits_are_equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@pytest.mark.exhaustive
def test_a_spike_is_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The state is bitwise that without the batch, whose gradients were finite."""
    data, guard = batches(14, spikes=[11]), LossSpike(factor=5, window=10)
    with caplog.at_level(logging.WARNING, "distribute_jax"):
        after = fit_one_epoch(compiled_model(), data, guard)
    assert guard.spikes == 1
    assert "Step 11 was skipped: the loss is more than 5 times the median" in caplog.text
    without = fit_one_epoch(
        compiled_model(), [*data[:11], *data[12:]], LossSpike(factor=5, window=10)
    )
    assert bits_are_equal(after, without)


@pytest.mark.exhaustive
def test_warn_changes_nothing_and_rollback_goes_back() -> None:
    """To the state at the last multiple of the window, a few batches after the spike."""
    data, states = batches(12, spikes=[8]), {}
    warns = LossSpike(factor=5, window=4, policy="warn")
    after = fit_one_epoch(compiled_model(), data, warns)
    assert warns.spikes == 1
    never = LossSpike(factor=1e9, window=4, policy="warn")
    assert bits_are_equal(after, fit_one_epoch(compiled_model(), data, never))
    assert never.spikes == 0
    model = compiled_model()
    note = LambdaCallback(on_train_batch_end=lambda batch, _: states.update({batch: state(model)}))
    guard = LossSpike(factor=5, window=4, policy="rollback")
    model.fit(data, verbose=0, callbacks=[note, guard])
    assert guard.spikes == 1
    back = [b for b in range(8, 12) if bits_are_equal(states[7], states[b])]
    assert back == [8]  # skipped at once
    assert bits_are_equal(state(model), states[7])  # looked at after four more, at the latest


def test_a_fit_that_is_refused_leaves_no_detection_of_spikes() -> None:
    model = compiled_model()
    with pytest.raises(dj.ArgumentError, match="SwapEMAWeights needs"):
        fit_one_epoch(model, batches(1), LossSpike(), dj.callbacks.SwapEMAWeights())
    assert model.trainer.setup.tracker.spikes is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_parameter_servers_skip_and_roll_back_as_one_device(policy: str) -> None:
    data, guards, states = batches(14, spikes=[11]), [], []
    for strategy in (dj.OneDeviceStrategy("cpu:0"), dj.ParameterServerStrategy(max_staleness=0)):
        guards.append(LossSpike(factor=5, window=10, policy=policy))
        states.append(fit_one_epoch(compiled_model(strategy), data, guards[-1]))
    assert [guard.spikes for guard in guards] == [1, 1]
    assert bits_are_equal(*states)


@pytest.mark.exhaustive
def test_a_resumed_training_has_the_loss_window(tmp_path: Path) -> None:
    data = batches(14, spikes=[11])

    def stop(batch: int, _: Any) -> None:
        if batch == 10:
            raise KeyboardInterrupt

    def saving() -> BackupAndRestore:
        return BackupAndRestore(tmp_path / "backup", save_freq=11)

    guard, model = LossSpike(factor=5, window=10), compiled_model()
    with pytest.raises(KeyboardInterrupt):
        fit_one_epoch(model, data, saving(), guard, LambdaCallback(on_train_batch_end=stop))
    again = LossSpike(factor=5, window=10)
    after = fit_one_epoch(compiled_model(), data, saving(), again)
    assert again.spikes == 1
    assert bits_are_equal(
        after, fit_one_epoch(compiled_model(), data, LossSpike(factor=5, window=10))
    )


@pytest.mark.exhaustive
def test_no_false_alarm_in_a_thousand_clean_steps() -> None:
    guard = LossSpike(window=50)
    fit_one_epoch(compiled_model(dj.OneDeviceStrategy("cpu:0")), batches(1000), guard)
    assert guard.spikes == 0


@pytest.mark.exhaustive
def test_a_window_of_spikes_ends_the_training() -> None:
    data = batches(12, spikes=range(6, 12))
    model = compiled_model()
    with pytest.raises(dj.StepsSkippedError, match="4 steps in a row"):
        fit_one_epoch(model, data, LossSpike(factor=5, window=3))
    assert bits_are_equal(
        state(model), fit_one_epoch(compiled_model(), data[:6], LossSpike(factor=5, window=3))
    )


def flip_bit(model: dj.Model, where: str, device: int, bit: int) -> str:
    """Flips one bit on one device, in a float32 variable; returns its name."""
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


@pytest.mark.parametrize("seed", [0, *map(long, range(1, 4))])
def test_a_flipped_bit_is_found_at_the_next_check_with_leaf_and_device(seed: int) -> None:
    check_flips_are_found(np.random.default_rng(seed), dj.MirroredStrategy([0, 1, 2, 3]), 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_two_hundred_of_two_hundred_flipped_bits_are_found(replicas: int) -> None:
    """On any device but the first of two, since two copies have no majority."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    check_flips_are_found(np.random.default_rng(replicas), strategy, 200)


def check_flips_are_found(rng: np.random.Generator, strategy: dj.Strategy, times: int) -> None:
    data, replicas = batches(5), strategy.num_replicas_in_sync
    model = compiled_model(strategy)
    for _ in range(times):
        start = dj.snapshot(model.module), dj.snapshot(model.optimizer)
        where = ("module", "optimizer")[rng.integers(2)]
        device = int(rng.integers(1 if replicas == 2 else 0, replicas))
        bit = int(rng.integers(2**20))
        leaf = []

        def damage(batch: int, _: Any, at: Any = (where, device, bit), leaf: Any = leaf) -> None:
            if batch == 1:
                leaf.append(flip_bit(model, *at))

        callbacks = [LambdaCallback(on_train_batch_end=damage), CheckInSync(every=2)]
        with pytest.raises(dj.OutOfSyncError) as caught:
            fit_one_epoch(model, data, *callbacks)
        lines = str(caught.value).splitlines()
        assert any(leaf[0] in line and f": cpu:{device} unequal to" in line for line in lines)
        nnx.update(model.module, start[0])
        nnx.update(model.optimizer, start[1])


@pytest.mark.exhaustive
def test_a_flipped_bit_is_healed_by_the_majority_bitwise() -> None:
    def run(strategy: dj.Strategy, device: int | None) -> list[np.ndarray]:
        model = compiled_model(strategy)

        def damage(batch: int, _: Any) -> None:
            if batch == 4 and device is not None:
                flip_bit(model, "module", device, 12345)
                flip_bit(model, "optimizer", device, 54321)

        heals = CheckInSync(every=5, policy="heal")
        after = fit_one_epoch(model, batches(5), LambdaCallback(on_train_batch_end=damage), heals)
        dj.check_in_sync((model.module, model.optimizer))
        return after

    s3 = dj.MirroredStrategy([0, 1, 2])
    with pytest.warns(RuntimeWarning, match="cpu:1 unequal to cpu:0, cpu:2"):
        healed = run(s3, 1)
    assert bits_are_equal(healed, run(s3, None))
    with pytest.raises(dj.OutOfSyncError, match="not the majority"):
        run(dj.MirroredStrategy([0, 1]), 1)


FAULTS: list[int] = []


class Faulty(nnx.Module):
    """A layer whose output is wrong on replica 2 while ``FAULTS`` has an entry."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        def factor(replica: Any) -> np.float32:
            return np.float32(1 + 1e-6 if int(replica) == 2 and FAULTS and FAULTS.pop() else 1)

        replica = dj.get_replica_context().replica_id_in_sync_group
        wrong = io_callback(factor, jax.ShapeDtypeStruct((), jnp.float32), replica)
        return self.layer(x * jax.lax.stop_gradient(wrong))


@pytest.mark.exhaustive
def test_a_wrong_gradient_is_found_before_it_is_used() -> None:
    """The replica and the variables are named, and nothing was trained on; clean replays say nothing."""
    model = compiled_model(dj.MirroredStrategy([0, 1, 2, 3]), Faulty)
    fit_one_epoch(model, batches(4), dj.callbacks.ReplaySteps(every=2))
    before = state(model)
    FAULTS.append(1)
    with pytest.raises(dj.NotEqualError, match=r"replica 2: layer\.bias, layer\.kernel") as caught:
        fit_one_epoch(model, batches(4), dj.callbacks.ReplaySteps(every=1))
    assert "replica 1:" not in str(caught.value)
    assert bits_are_equal(state(model), before)


@pytest.mark.exhaustive
def test_a_saved_step_is_replayed(tmp_path: Path) -> None:
    """The hashes are equal on other devices, and differ with other weights."""
    model = compiled_model(dj.MirroredStrategy([0, 1, 2, 3]))
    model.save(tmp_path / "before")
    x, y = batches(1)[0]
    first = dj.testing.replay_step(model, tmp_path / "before", (x, y))
    shapes = {name: hashes.shape for name, hashes in first.items()}
    assert shapes == {"layer.bias": (4, 2), "layer.kernel": (4, 2)}
    fit_one_epoch(model, batches(3))
    other = compiled_model(dj.MirroredStrategy([7, 4, 5, 6]))
    again = dj.testing.replay_step(other, tmp_path / "before", (x, y))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    model.save(tmp_path / "after")
    later = dj.testing.replay_step(model, tmp_path / "after", (x, y))
    assert not np.array_equal(first["layer.kernel"], later["layer.kernel"])
