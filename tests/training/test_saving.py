"""A model saved under one strategy goes on under any other; a new process goes on to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


PROGRAM = """
import json, sys
import numpy as np, optax
import distribute_jax as dj
from flax import nnx

dj.simulate(8)
rng = np.random.default_rng(0)
x = rng.normal(size=(22, 4)).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int32)

class Net(nnx.Module):
    def __init__(self, dropout):
        rngs = nnx.Rngs(0, dropout=1)
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
    def __call__(self, x):
        return self.b(self.dropout(nnx.relu(self.a(x))))

def trained(replicas, dropout, source, first, last, start, saved):
    with dj.MirroredStrategy(list(range(replicas))).scope():
        model = dj.Model(Net(dropout))
        model.compile(optax.adam(0.01), dj.losses.SparseCategoricalCrossentropy(from_logits=True))
    if start:
        model.load(start)
    if source == "arrays":
        data, targets, size = x, y, 8
    else:
        import grain
        rows = grain.MapDataset.range(22).shuffle(seed=3).map(lambda i: (x[i], y[i]))
        data, targets, size = rows.batch(8), None, None
    model.fit(data, targets, batch_size=size, initial_epoch=first, epochs=last, verbose=0)
    model.save(saved)
    return [np.asarray(w, np.float64).ravel().tolist() for w in model.get_weights()]

print(json.dumps([trained(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


def run(trainings: list[list[Any]]) -> list[list[np.ndarray]]:
    """Trains in a new process, and gives the weights of each training."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(trainings)],
        capture_output=True, text=True, timeout=300, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [[np.array(w) for w in weights] for weights in found]


@pytest.mark.exhaustive
def test_a_run_that_was_saved_and_went_on_equals_one_that_was_not(tmp_path: Path):
    """Two epochs are one epoch, a new process and one epoch: bitwise, with dropout, Adam and shuffling.

    Without dropout, which draws by replica, four replicas and two end at the same weights.
    """
    first = [(4, 0.3, "arrays"), (4, 0.3, "grain"), (4, 0.0, "arrays")]
    then = [*first[:2], (2, 0.0, "arrays")]
    half = [str(tmp_path / f"half {i}") for i in range(3)]
    end = str(tmp_path / "end")
    wholes, halves = (
        [[*case, 0, last, None, saved] for case, saved in zip(first, where, strict=True)]
        for last, where in ((2, [end] * 3), (1, half))
    )
    wanted = run(wholes + halves)[:3]
    found = run([[*case, 1, 2, saved, end] for case, saved in zip(then, half, strict=True)])
    for i, same in enumerate((np.array_equal, np.array_equal, nearly_equal)):
        assert all(same(a, b) for a, b in zip(wanted[i], found[i], strict=True)), then[i]


def nearly_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays differ by rounding only."""
    return np.allclose(a, b, rtol=1e-5, atol=1e-6)
