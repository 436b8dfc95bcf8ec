"""Saving and loading models, also from plain Flax programs; ``SidecarEvaluator``, ``DatasetCreator``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from model_factory import Scale, compile_model

import distribute_jax as dj
from distribute_jax.training import _sidecar

X = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1)
Y = np.zeros((8, 1), np.float32)


def make_model(devices: list[int]) -> dj.Model:
    return compile_model(dj.MirroredStrategy(devices), Scale)


def test_a_saved_model_continues_under_another_strategy(tmp_path: Path):
    model = make_model([0, 1])
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "saved")
    for devices in ([0, 1, 2, 3], [5]):
        other = make_model(devices)
        other.load(tmp_path / "saved")
        assert float(other.get_weights()[0][0]) == pytest.approx(0.49)
        assert int(other.optimizer.step[...]) == 1
        history = other.fit(X, Y, batch_size=8, verbose=0)
        assert history.history["loss"] == pytest.approx([6.12255])


def test_save_weights_leaves_the_optimizer_out(tmp_path: Path):
    """Weights of another module are refused, with a list."""
    model, other = make_model([0, 1]), make_model([0, 1, 2, 3])
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save_weights(tmp_path / "weights")
    other.load_weights(tmp_path / "weights")
    assert float(other.get_weights()[0][0]) == pytest.approx(0.49)
    assert int(other.optimizer.step[...]) == 0
    with pytest.raises(dj.CheckpointError, match="load_weights what save_weights wrote"):
        other.load(tmp_path / "weights")
    with dj.MirroredStrategy([0]).scope():
        linear = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(dj.CheckpointError, match=r"(?s)kernel.*w|w.*kernel"):
        linear.load_weights(tmp_path / "weights")


class Drops(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.dropout(nnx.relu(self.a(x))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["arrays", "grain"])
def test_a_saved_and_resumed_training_equals_an_uninterrupted_one(
    source: str, s4: dj.Strategy, tmp_path: Path
):
    """Bitwise, with dropout, Adam and shuffling."""
    x = np.random.default_rng(0).normal(size=(22, 4)).astype(np.float32)
    data: dict[str, Any] = {"x": x, "y": x[:, :1], "batch_size": 8}
    if source == "grain":
        rows = grain.MapDataset.range(22).shuffle(seed=3).map(lambda i: (x[i], x[i, :1]))
        data = {"x": rows.batch(8)}

    def trained(first: int, last: int) -> list[np.ndarray]:
        model = compile_model(s4, Drops, optimizer=optax.adam(0.01))
        if first:
            model.load(tmp_path / f"{first}")
        model.fit(initial_epoch=first, epochs=last, verbose=0, **data)
        model.save(tmp_path / f"{last}")
        return model.get_weights()

    whole = trained(0, 2)
    trained(0, 1)
    assert all(map(np.array_equal, trained(1, 2), whole))


ONES = np.ones((6, 1), np.float32)


@pytest.mark.exhaustive
def test_the_newest_complete_checkpoint_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of steps 9, 10 and a damaged 11 the second, then one that is written meanwhile."""
    trained, manager = Scale(), dj.CheckpointManager(tmp_path)

    def save(step: int) -> None:
        trained.w[...] = jnp.full((1,), float(step))
        manager.save(step, {"module": trained, "best": 0.5})
        manager.wait()

    for step in (9, 10, 11):
        save(step)
    for path in (tmp_path / "11").rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.write_bytes(b"x" * path.stat().st_size)
    (tmp_path / ".12.ab.saving").mkdir()
    losses: list[float] = []
    notes = dj.callbacks.LambdaCallback(on_test_end=lambda logs: losses.append(logs["loss"]))
    monkeypatch.setattr(_sidecar, "_POLLS_BEFORE_WARNING", 1)
    waits = iter([lambda: None, lambda: save(13)])
    monkeypatch.setattr(_sidecar.time, "sleep", lambda _: next(waits)())
    evaluator = dj.SidecarEvaluator(
        make_model([0, 1]), (ONES, 0 * ONES), tmp_path, max_evaluations=2, callbacks=[notes]
    )
    evaluator.start()
    assert caplog.text.count("skips 11") == 1
    assert losses == [100, 169]
    assert caplog.text.count(f"is waiting for a new checkpoint in {tmp_path}") == 1


@pytest.mark.exhaustive
def test_a_checkpoint_that_is_deleted_meanwhile_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model([0, 1])
    for step in (1, 2):
        model.save(tmp_path / f"{step}")
    load = _sidecar.checkpoint.load

    def delete_2_and_load(path: str, *args: Any, **options: Any) -> Any:
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return load(path, *args, **options)

    monkeypatch.setattr(_sidecar.checkpoint, "load", delete_2_and_load)
    evaluator = dj.SidecarEvaluator(model, (ONES, ONES), tmp_path, max_evaluations=1)
    evaluator.start()
    assert evaluator._last == 1
    assert "skips 2: There is no checkpoint" in caplog.text


@pytest.mark.exhaustive
def test_fit_accepts_a_dataset_creator() -> None:
    sizes = []

    def dataset_fn(context: dj.InputContext) -> Any:
        sizes.append(context.get_per_replica_batch_size(4))
        return [(ONES[:2], ONES[:2]), (ONES[:2], ONES[:2]), (ONES[:1], ONES[:1])]

    model = make_model([0, 1])
    model.fit(dj.DatasetCreator(dataset_fn), verbose=0)
    assert sizes == [2]
    assert int(model.trainer.setup.tracker.loss.count[...]) == 5
    with pytest.raises(TypeError, match="dataset_fn must be a function"):
        dj.DatasetCreator([ONES])  # type: ignore[arg-type]


INPUTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, seed: int, width: int = 4) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.BatchNorm(use_running_average=True)(linen.Dense(4)(x))
        return linen.Dense(2)(x)


def saved(path: Path, tree: Any, checkpointer: Any = ocp.StandardCheckpointer) -> Path:
    with checkpointer() as writer:
        writer.save(path, tree)
    return path


@pytest.mark.exhaustive
def test_weights_of_an_nnx_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An ``nnx.State``, also beside an optimizer and in a step of a manager; onto four devices."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = Net(0)
    state = nnx.state(source)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(3, args=ocp.args.StandardSave(nnx.as_pure(state)))
    both = {"model": state, "optimizer": {"step": np.zeros(()), "mu": nnx.as_pure(state)}}
    for path in (
        saved(tmp_path / "state", state, ocp.PyTreeCheckpointer),
        saved(tmp_path / "both", both),
        "~/steps/3",
    ):
        with dj.FullyShardedStrategy([0, 1, 2, 3]).scope():
            model = dj.Model(Net(1))
        model.load_weights(path)
        assert all(map(np.array_equal, model.get_weights(), dj.Model(source).get_weights()))


@pytest.mark.exhaustive
def test_weights_of_a_linen_program(tmp_path: Path):
    """Its variables, and those in a ``TrainState``."""
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
    model = dj.Model(Linen(), sample_input=INPUTS)
    for path in (saved(tmp_path / "variables", variables), saved(tmp_path / "state", tree)):
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        model.load_weights(path)
        np.testing.assert_array_equal(
            model.module.Dense_0["kernel"], np.float32(params["Dense_0"]["kernel"])
        )
        np.testing.assert_array_equal(model.module.BatchNorm_0["var"], np.ones(4))


@pytest.mark.exhaustive
def test_other_weights_are_refused_by_name_with_the_nearest(tmp_path: Path):
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
    with pytest.raises(dj.CheckpointError, match=r"several trees or steps.* such as .*/3/b"):
        model.load_weights(tmp_path / "steps" / "3")
    with pytest.raises(dj.CheckpointError, match=r"several trees or steps.* such as .*/3"):
        model.load_weights(tmp_path / "steps")
    (tmp_path / "other" / "_METADATA").write_text("{")
    with pytest.raises(dj.CheckpointDamagedError, match="Orbax cannot read"):
        model.load_weights(tmp_path / "other")
