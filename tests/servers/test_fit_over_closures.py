"""``fit``, ``evaluate`` and ``predict`` under ``ParameterServerStrategy``: each batch is a closure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import assert_same_bits, numbers
from test_processes import children

import distribute_jax as dj
from distribute_jax.callbacks import BackupAndRestore, LambdaCallback, ModelCheckpoint
from distribute_jax.coordinator import ClusterCoordinator

pytestmark = pytest.mark.exhaustive

random = np.random.default_rng(0)
X = random.normal(size=(139, 8)).astype(np.float32)
Y = random.integers(0, 3, 139)


def network() -> nnx.Sequential:
    """Two layers with dropout."""
    rngs = nnx.Rngs(0)
    first, dropout = nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    return nnx.Sequential(first, nnx.relu, dropout, nnx.Linear(16, 3, rngs=rngs))


def model_on(strategy: dj.Strategy) -> dj.Model:
    """A compiled model."""
    with strategy.scope():
        model = dj.Model(network())
    loss = dj.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optax.inject_hyperparams(optax.adam)(1e-2), loss=loss, metrics=["accuracy"])
    return model


def servers(staleness: float = 0) -> dj.ParameterServerStrategy:
    """Three workers and two servers."""
    return dj.ParameterServerStrategy(workers=3, servers=2, max_staleness=staleness)


def state_of(model: dj.Model) -> list[Any]:
    """All numbers of a model and its optimizer."""
    return numbers(nnx.state((model.module, model.optimizer)))


@pytest.fixture(scope="module")
def of_one() -> tuple[dj.Model, Any]:
    """A model that one device has trained for two epochs of 17 batches of 8 and one of 3."""
    model = model_on(dj.OneDeviceStrategy("cpu:0"))
    return model, model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history


def test_without_staleness_everything_has_the_bits_of_one_device(of_one: Any) -> None:
    """History, weights, optimizer, evaluation and prediction, the partial batch included."""
    expected, history = of_one
    strategy = servers()
    model = model_on(strategy)
    assert model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history == history
    assert_same_bits(state_of(model), state_of(expected))
    assert model.evaluate(X, Y, batch_size=8, verbose=0) == expected.evaluate(
        X, Y, batch_size=8, verbose=0
    )
    assert int(model.trainer.setup.test_tracker.loss.count[...]) == 139
    np.testing.assert_array_equal(
        model.predict(X, batch_size=8, verbose=0), expected.predict(X, batch_size=8, verbose=0)
    )
    version = ClusterCoordinator(strategy).stats.version
    assert version == 3 * 18, "updates of two epochs and an evaluation"


def test_with_staleness_each_example_counts_once() -> None:
    """Weights differ from those of one device, but not the number of examples."""
    model = model_on(servers(staleness=3))
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    assert int(model.trainer.setup.tracker.loss.count[...]) == 139
    assert int(model.optimizer.step[...]) == 18


def test_saves_between_batches_have_all_batches_before(of_one: Any, tmp_path: Path) -> None:
    """A training that was interrupted goes on from batch 6 on one device, as if it had not been."""
    seen: list[Any] = []

    def stop(batch: int, logs: Any) -> None:
        seen.append(logs["loss"])
        if batch == 8:
            raise KeyboardInterrupt

    model = model_on(servers())
    callbacks = [
        BackupAndRestore(tmp_path / "backup", save_freq=6),
        ModelCheckpoint(tmp_path / "{batch}", save_freq=6),
        LambdaCallback(on_train_batch_end=stop),
    ]
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.step[...]) == 9, "what was under way has ended"
    assert np.isfinite(seen).all()
    model.load(tmp_path / "6")
    assert int(model.optimizer.step[...]) == 6
    one = model_on(dj.OneDeviceStrategy("cpu:0"))
    one.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks[:1])
    assert_same_bits(state_of(one), state_of(of_one[0]))
    one.save(tmp_path / "back")
    model.load(tmp_path / "back")
    for each in (model, one):
        each.fit(X[:32], Y[:32], batch_size=8, verbose=0)
    assert_same_bits(state_of(model), state_of(one))


def test_a_batch_whose_worker_is_killed_counts_once(of_one: Any) -> None:
    """In processes the history and the state are those of one device although a worker and a server end."""

    def kill(batch: int, logs: Any) -> None:
        if batch in (5, 9):
            os.kill(children("worker" if batch == 5 else "server")[0], signal.SIGKILL)

    strategy = dj.ParameterServerStrategy(engine="processes", workers=3, max_staleness=0)
    model, killing = model_on(strategy), LambdaCallback(on_train_batch_end=kill)
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[killing]).history
    assert history == of_one[1]
    assert_same_bits(state_of(model), state_of(of_one[0]))
    assert int(model.trainer.setup.tracker.loss.count[...]) == 139


class WithStep(dj.Model):
    """A model that overrides its step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        def loss_of(module: Any) -> Any:
            return dj.compute_average_loss(jax.numpy.square(module(data[0])).sum(1))

        loss, gradients = nnx.value_and_grad(loss_of)(self.module)
        self.optimizer.update(self.module, gradients)
        return {"loss": loss}


def test_a_step_that_changes_the_weights_on_the_servers_is_not_said_to_change_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = servers()
    with strategy.scope():
        model = WithStep(nnx.Linear(8, 1, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    losses = model.fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert "changed no variable" not in caplog.text
