"""``Model.export``: a file that JAX alone runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long
from flax import nnx
from jax.sharding import PartitionSpec

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Net(nnx.Module):
    """Dropout and a batch norm, which differ in evaluation, and two inputs."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(4, axis_name="data", rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(2))

    def __call__(self, x: dict[str, jax.Array]) -> jax.Array:
        return self.layer(self.dropout(self.norm(x["a"] + x["b"])))


def exported(strategy: dj.Strategy, path: Path, *, trains: bool = True) -> np.ndarray:
    """Exports a model, inside the scope, and returns its predictions."""
    with strategy.scope():
        model = dj.Model(strategy.create(Net))
        if trains:
            model.compile("sgd", "mse")
            model.fit({"a": X, "b": X}, X, batch_size=8, verbose=0)
        model.export(path, {"a": X[:1], "b": X[:1]})
        return model.predict({"a": X, "b": X}, verbose=0)


def served(path: Path) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(path.read_bytes()))


STRATEGIES: dict[str, Callable[[], dj.Strategy]] = {
    "mirrored": lambda: dj.MirroredStrategy([0, 1, 2, 3]),
    "fully sharded": lambda: dj.FullyShardedStrategy([0, 1, 2, 3]),
    "central storage": lambda: dj.CentralStorageStrategy([0, 1]),
    "model parallel": lambda: dj.ModelParallelStrategy(
        [0, 1, 2, 3], model=2, rules={"kernel": PartitionSpec(None, "model")}
    ),
    "parameter servers": lambda: dj.ParameterServerStrategy(engine="threads"),
}


@pytest.mark.parametrize("name", [n if n == "mirrored" else long(n) for n in STRATEGIES])
def test_an_exported_model_predicts_any_number_of_examples(name: str, tmp_path: Path):
    outputs = exported(STRATEGIES[name](), tmp_path / "model", trains=name != "mirrored")
    program = served(tmp_path / "model")
    assert (program.platforms, program.nr_devices) == (("cpu", "cuda", "tpu"), 1)
    assert [str(leaf.shape) for leaf in program.in_avals] == ["(batch, 4)"] * 2
    result = program.call({"a": X[:7], "b": X[:7]})
    np.testing.assert_allclose(result, outputs[:7], rtol=1e-5, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


SERVE = """
import sys, jax, jax.export, numpy as np
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x = np.load(sys.argv[2])
np.save(sys.argv[3], program.call({"a": x, "b": x}))
assert not any(name.startswith(("distribute_jax", "flax")) for name in sys.modules)
"""


@pytest.mark.exhaustive
def test_a_fresh_process_serves_it_without_this_library(tmp_path: Path):
    outputs = exported(STRATEGIES["fully sharded"](), tmp_path / "model")
    np.save(tmp_path / "x.npy", X)
    files = [str(tmp_path / name) for name in ("model", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", SERVE, *files], check=True, timeout=300)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), outputs, rtol=1e-5, atol=1e-6)


class Doubles(dj.Model):
    def predict_step(self, batch: Any) -> Any:
        return 2 * self.module(batch[0])


class Calls(nnx.Module):
    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x)


def test_a_module_that_cannot_be_exported_is_refused_and_leaves_the_file(
    tmp_path: Path, monkeypatch
):
    """A batch of any size, a platform, a callback, the user's mistake; a step of the user's is exported."""
    path = tmp_path / "model"
    path.write_bytes(b"old")

    halves = dj.Model(Calls(lambda x: x if x.shape[0] > 3 else x + 1))
    with pytest.raises(
        dj.LoweringError, match=r"a batch of any size: .*batch' > '3'.*\n.*batch_size=8"
    ):
        halves.export(path, X)
    calls_back = dj.Model(Calls(lambda x: jax.pure_callback(lambda a: a, x, x)))
    with pytest.raises(dj.LoweringError, match=r"JAX cannot export the module: .*callback"):
        calls_back.export(path, X)
    with pytest.raises(TypeError, match="dot_general"):
        dj.Model(Calls(lambda x: x @ jnp.ones((3, 3)))).export(path, X)
    with pytest.raises(ValueError, match="takes arrays of examples"):
        halves.export(path, iter([X]))
    with pytest.raises(ValueError, match="one of 'cpu', 'cuda', 'tpu'"):
        halves.export(path, X, platforms=["gpu"])
    with pytest.raises(ValueError, match="path must be a path; got ''"):
        halves.export("", X)
    assert path.read_bytes() == b"old"

    halves.export(path, X, batch_size=2)
    np.testing.assert_array_equal(served(path).call(X[:2]), X[:2] + 1)
    Doubles(Calls(lambda x: x + 1)).export(path, X)
    np.testing.assert_array_equal(served(path).call(X), 2 * X + 2)
    squares = dj.Model(Calls(lambda x: jnp.linalg.eig(x[:, :, None] * x[:, None])[0]))
    with pytest.warns(UserWarning, match=r"the file is for cpu only: .*eig"):
        squares.export(path, X)
    assert served(path).platforms == ("cpu",)

    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(dj.MissingPackageError, match=r"pip install 'distribute-jax\[export\]'"):
        halves.export(path, X)
