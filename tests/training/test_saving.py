"""A model saved under one strategy goes on under any other; a new model goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

X = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1)
Y = np.zeros((8, 1), np.float32)


class Scale(nnx.Module):
    """y = w * x."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((1,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...]


def made(devices: list[int]) -> dj.Model:
    with dj.MirroredStrategy(devices).scope():
        model = dj.Model(Scale())
        model.compile(optax.sgd(0.01), "mse")
    return model


def test_a_model_goes_on_under_another_strategy(tmp_path: Path):
    """Saved after one step on two replicas: w 0.49, step 1, and the next loss is 6.12255 everywhere."""
    model = made([0, 1])
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "saved")
    for devices in ([0], [0, 1, 2, 3], [5]):
        other = made(devices)
        other.load(tmp_path / "saved")
        assert float(other.get_weights()[0][0]) == pytest.approx(0.49)
        assert int(other.optimizer.step[...]) == 1
        history = other.fit(X, Y, batch_size=8, verbose=0)
        assert history.history["loss"] == pytest.approx([6.12255])


def test_weights_alone_and_what_does_not_fit(tmp_path: Path):
    """save_weights leaves the optimizer out; another module's weights are refused, all listed."""
    model, other = made([0, 1]), made([0, 1, 2, 3])
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save_weights(tmp_path / "weights")
    other.load_weights(tmp_path / "weights")
    assert float(other.get_weights()[0][0]) == pytest.approx(0.49)
    assert int(other.optimizer.step[...]) == 0
    with pytest.raises(dj.CheckpointError, match=r"model\.load_weights"):
        other.load(tmp_path / "weights")
    with dj.MirroredStrategy([0]).scope():
        linear = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(dj.CheckpointError, match=r"(?s)kernel.*w|w.*kernel"):
        linear.load_weights(tmp_path / "weights")


class Drops(nnx.Module):
    """Two layers with dropout between."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.dropout(nnx.relu(self.a(x))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["arrays", "grain"])
def test_a_run_that_was_saved_and_went_on_equals_one_that_was_not(
    source: str, s4: dj.Strategy, tmp_path: Path
):
    """Two epochs are one epoch, a new model and one epoch: bitwise, with dropout, Adam and shuffling."""
    x = np.random.default_rng(0).normal(size=(22, 4)).astype(np.float32)
    data: dict[str, Any] = {"x": x, "y": x[:, :1], "batch_size": 8}
    if source == "grain":
        rows = grain.MapDataset.range(22).shuffle(seed=3).map(lambda i: (x[i], x[i, :1]))
        data = {"x": rows.batch(8)}

    def trained(first: int, last: int) -> list[np.ndarray]:
        with s4.scope():
            model = dj.Model(Drops())
        model.compile(optax.adam(0.01), "mse")
        if first:
            model.load(tmp_path / f"{first}")
        model.fit(initial_epoch=first, epochs=last, verbose=0, **data)
        model.save(tmp_path / f"{last}")
        return model.get_weights()

    whole = trained(0, 2)
    trained(0, 1)
    assert all(map(np.array_equal, trained(1, 2), whole))
