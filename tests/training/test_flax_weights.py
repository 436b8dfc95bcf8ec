"""``Model.load_weights`` of what plain Flax programs saved with Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Net(nnx.Module):
    """A list of layers, a batch norm and random streams."""

    def __init__(self, seed: int, width: int = 4) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


class Linen(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.BatchNorm(use_running_average=True)(linen.Dense(4)(x))
        return linen.Dense(2)(x)


def saved(path: Path, tree: Any, checkpointer: Any = ocp.StandardCheckpointer) -> Path:
    with checkpointer() as writer:
        writer.save(path, tree)
    return path


def test_weights_of_an_nnx_program(tmp_path: Path):
    """An nnx.State, beside an optimizer too, and a step of a manager; into weights on four devices."""
    source = Net(0)
    state = nnx.state(source)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(3, args=ocp.args.StandardSave(nnx.as_pure(state)))
    both = {"model": state, "optimizer": {"step": np.zeros(()), "mu": nnx.as_pure(state)}}
    for path in (
        saved(tmp_path / "state", state, ocp.PyTreeCheckpointer),
        saved(tmp_path / "both", both),
        tmp_path / "steps" / "3",
    ):
        with dj.FullyShardedStrategy([0, 1, 2, 3]).scope():
            model = dj.Model(Net(1))
        model.load_weights(path)
        assert all(map(np.array_equal, model.get_weights(), dj.Model(source).get_weights()))


def test_weights_of_a_linen_program(tmp_path: Path):
    """Its variables, and what a TrainState with them is saved as."""
    numbers = np.random.default_rng(1)
    shapes = {
        "Dense_0": {"kernel": (3, 4), "bias": (4,)},
        "Dense_1": {"kernel": (4, 2), "bias": (2,)},
    }
    shapes["BatchNorm_0"] = {"scale": (4,), "bias": (4,)}
    params = jax.tree.map(numbers.random, shapes, is_leaf=lambda x: isinstance(x, tuple))
    stats = {"BatchNorm_0": {"mean": np.zeros(4), "var": np.ones(4)}}
    variables = {"params": params, "batch_stats": stats}
    state = {"step": np.zeros(()), "params": params, "opt_state": [{"mu": params}, None]}
    tree = {"state": state, "batch_stats": stats}
    model = dj.Model(Linen(), sample_input=X)
    for path in (saved(tmp_path / "variables", variables), saved(tmp_path / "state", tree)):
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        model.load_weights(path)
        np.testing.assert_array_equal(
            model.module.Dense_0["kernel"], np.float32(params["Dense_0"]["kernel"])
        )
        np.testing.assert_array_equal(model.module.BatchNorm_0["var"], np.ones(4))


def test_other_weights_are_refused_by_name_with_the_nearest(tmp_path: Path):
    """Shapes and names; the model is as before. Of several trees one has to be named."""
    tree = nnx.as_pure(nnx.state(Net(0, width=5)))
    tree["norms"] = tree.pop("norm")
    model = dj.Model(Net(1))
    before = model.get_weights()
    with pytest.raises(dj.CheckpointError) as caught:
        model.load_weights(saved(tmp_path / "other", tree))
    lines = str(caught.value).splitlines()
    assert "  layers.0.kernel: (3, 5) saved, (3, 4) in the module" in lines
    assert "  norm.mean: not saved; norms.mean?" in lines
    assert "  norms.bias: saved, and not in the module" in lines
    assert all(map(np.array_equal, model.get_weights(), before))
    with ocp.CheckpointManager(tmp_path / "steps", item_names=("a", "b")) as manager:
        items = {name: ocp.args.StandardSave(tree) for name in "ab"}
        manager.save(3, args=ocp.args.Composite(**items))
    with pytest.raises(dj.CheckpointError, match=r"checkpoint of 2 trees \(a, b\)"):
        model.load_weights(tmp_path / "steps" / "3")
    with pytest.raises(dj.CheckpointError, match=r"of steps 3\. Give the path of one: .*/3"):
        model.load_weights(tmp_path / "steps")
    (tmp_path / "other" / "_METADATA").write_text("{")
    with pytest.raises(dj.CheckpointDamagedError, match="Orbax cannot read"):
        model.load_weights(tmp_path / "other")
    with pytest.raises(dj.CheckpointError, match=r"by Orbax.*model\.load_weights"):
        model.load(tmp_path / "other")
