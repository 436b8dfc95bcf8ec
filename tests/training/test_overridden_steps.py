"""Overridden ``train_step``, ``test_step`` and ``predict_step``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Signed(dj.Model):
    """Reports the signed mean error, and predicts signs."""

    def test_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)
        logs = super().test_step(batch)
        error = dj.compute_average_loss((self.module(x) - y)[:, 0])
        return logs | {"error": error, "of all": dj.get_replica_context().all_reduce("sum", error)}

    def predict_step(self, batch: Any) -> Any:
        return {"sign": jnp.sign(super().predict_step(batch))[:, 0]}


RETURNED = {  # by what the message says that the step returned
    r"float32\[\]\. .* a dict": jnp.zeros(()),
    r"'e': float32\[3\]\. .*average_loss": {"e": jnp.ones(3)},
    "'e': str 'low'": {"e": "low"},
    "'e': dict": {"e": {"f": 1.0}},
    "3: float 2.0": {"e": 1.0, 3: 2.0},
}


@pytest.mark.parametrize("got", RETURNED)
def test_a_step_that_returns_other_things_than_numbers_by_name_is_refused(got: str):
    other = type("Other", (dj.Model,), {"test_step": lambda *_: RETURNED[got]})
    model = other(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model.compile()
    with pytest.raises(dj.ArgumentError, match=f"test_step returned {got}"):
        model.evaluate(X, Y, verbose=0)


@pytest.mark.exhaustive
def test_steps_for_evaluation_and_prediction(s4: dj.Strategy):
    """Parts are summed over the replicas; values that the step has summed are not summed again."""
    with s4.scope():
        model = Signed(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    signs = model.predict(X, batch_size=8, verbose=0)["sign"]  # not compiled yet
    outputs = np.asarray(model.module(X))
    np.testing.assert_array_equal(signs, np.sign(outputs[:, 0]))
    model.compile("sgd", "mse")
    logs = model.evaluate(X, Y, batch_size=11, verbose=0, return_dict=True)
    expected = {"loss": np.mean((outputs - Y) ** 2), "error": np.mean(outputs - Y)}
    expected["of all"] = expected["error"]
    assert logs == pytest.approx(expected, rel=1e-5)
    history = model.fit(X, Y, batch_size=11, validation_data=(X, Y), verbose=0)
    assert set(history.history) == {"loss", "val_loss", "val_error", "val_of all"}


class Distiller(dj.Model):
    """Reads another module, a metric and a number, and updates a second module: all are its attributes."""

    weight = 0.0

    def train_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)
        self.seen.update_state(y[:, 0])
        for module, optimizer in (self.module, self.optimizer), (self.second, self.of_second):
            gradients = nnx.grad(lambda m: dj.compute_average_loss((m(x) - y)[:, 0] ** 2))(module)
            optimizer.update(module, gradients)
        return {"loss": dj.compute_average_loss(self.weight * self.teacher(x)[:, 0])}


@pytest.mark.exhaustive
def test_a_step_reaches_what_a_subclass_adds(s4: dj.Strategy):
    """Modules, optimizers and metrics are state; a number that a callback changes is that of the epoch."""
    zeros = nnx.initializers.zeros
    with s4.scope():
        linear = [nnx.Linear(3, 1, kernel_init=zeros, rngs=nnx.Rngs(0)) for _ in range(3)]
        model = Distiller(linear[0])
        model.second, model.teacher, model.seen = linear[1], linear[2], dj.metrics.Mean()
        model.of_second = dj.Optimizer(model.second, optax.sgd(0.1))
    model.teacher.bias[...] += 1.0
    model.compile(optax.sgd(0.1))
    change = dj.callbacks.LambdaCallback(lambda epoch, _: setattr(model, "weight", float(epoch)))
    history = model.fit(X, Y, batch_size=11, epochs=3, callbacks=[change], verbose=0).history
    assert history["loss"] == pytest.approx([0.0, 1.0, 2.0])
    assert float(model.seen.result()) == pytest.approx(float(Y.mean()), rel=1e-5)
    assert np.array_equal(model.second.kernel[...], model.module.kernel[...])
    assert np.any(model.second.kernel[...])


class Tracked(dj.Model):
    """Keras's habit: the step updates a metric, and returns its value."""

    def test_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)
        errors = abs(self.module(x) - y)[:, 0]
        self.error.update_state(errors)
        replica = dj.get_replica_context()
        self.last[...] = replica.all_reduce("sum", dj.compute_average_loss(errors))
        return {"error": self.error.result() if self.running else self.last[...]}


def test_the_value_of_a_metric_that_the_step_updated_is_refused(s4: dj.Strategy):
    """Its sum over the replicas would be nearly four times the value, and evaluation did not log that."""
    with s4.scope():
        model = Tracked(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        model.error, model.last = dj.metrics.Mean(), nnx.metrics.MetricState(jnp.zeros(()))
    model.compile()
    model.running = True
    with pytest.raises(
        dj.ArgumentError, match=r"test_step returned .*error.*value of .*error after"
    ):
        model.evaluate(X, Y, verbose=0)
    model.running = False
    last = model.evaluate(X, Y, verbose=0, return_dict=True)["error"]
    assert float(model.error.result()) == pytest.approx(last, rel=1e-5)


class Parts(dj.Model):
    """Returns parts that are equal on all replicas."""

    def test_step(self, batch: Any) -> Any:
        penalty = dj.scale_regularization_loss(jnp.sum(self.module.kernel[...] ** 2))
        rows = dj.get_replica_context().real_examples  # an int of Python for a full batch
        one = dj.compute_average_loss(jnp.ones(len(batch[0])))
        return {"penalty": penalty, "one": one, "rows": rows}


def test_parts_that_are_equal_on_all_replicas_are_summed_too(s4: dj.Strategy):
    with s4.scope():
        model = Parts(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model.compile(steps_per_execution=2)
    logs = model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)
    assert logs["one"] == pytest.approx(1)
    assert logs["rows"] == pytest.approx(11 / 3)
    assert logs["penalty"] == pytest.approx(float(np.sum(model.get_weights()[1] ** 2)))
