"""Overridden ``test_step`` and ``predict_step``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Signed(dj.Model):
    """Reports the signed mean error, and predicts signs."""

    def test_step(self, batch: Any) -> Any:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)
        super().test_step(batch)
        error = dj.compute_average_loss((self.module(x) - y)[:, 0])
        return {"error": error, "of all": dj.get_replica_context().all_reduce("sum", error)}

    def predict_step(self, batch: Any) -> Any:
        return {"sign": jnp.sign(super().predict_step(batch))[:, 0]}


class Alone(dj.Model):
    """Returns an array instead of a dict."""

    def test_step(self, batch: Any) -> Any:
        return jnp.zeros(())


def test_steps_for_evaluation_and_prediction(s4: dj.Strategy):
    """Parts are summed over the replicas; values that the step has summed are not summed again."""
    with s4.scope():
        model = Signed(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        wrong = Alone(model.module)
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
    wrong.compile()
    with pytest.raises(dj.ArgumentError, match=r"test_step returned .* a dict"):
        wrong.evaluate(X, Y, batch_size=11, verbose=0)
