"""``SidecarEvaluator``, and ``DatasetCreator`` in place of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.training import _sidecar

X = np.ones((6, 1), np.float32)


class Scale(nnx.Module):
    """y = w * x."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((1,)))

    def __call__(self, x: Any) -> Any:
        return x * self.w[...]


def model_of() -> dj.Model:
    """A compiled model."""
    with dj.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = dj.Model(Scale())
    model.compile("sgd", loss="mse")
    return model


def test_the_newest_checkpoint_that_is_whole_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of steps 9, 10 and a damaged 11 the second, then one that is waited for; it ends after two."""
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
    monkeypatch.setattr(_sidecar, "_PATIENCE", 1)
    waits = iter([lambda: None, lambda: save(13)])
    monkeypatch.setattr(_sidecar.time, "sleep", lambda _: next(waits)())
    evaluator = dj.SidecarEvaluator(
        model_of(), (X, 0 * X), tmp_path, max_evaluations=2, callbacks=[notes]
    )
    with pytest.warns(UserWarning, match="passes over 11"):
        evaluator.start()
    assert losses == [100, 169]
    assert caplog.text.count(f"waits for a new checkpoint in {tmp_path}") == 1


def test_fit_takes_a_function_that_makes_the_dataset() -> None:
    """It gets the context of the strategy, and its batches are those of replicas."""
    sizes = []

    def dataset_fn(context: dj.InputContext) -> Any:
        sizes.append(context.get_per_replica_batch_size(4))
        return [(X[:2], X[:2]), (X[:2], X[:2]), (X[:1], X[:1])]

    model = model_of()
    model.fit(dj.DatasetCreator(dataset_fn), verbose=0)
    assert sizes == [2]
    assert int(model.trainer.setup.tracker.loss.count[...]) == 5
    with pytest.raises(TypeError, match="dataset_fn must be a function"):
        dj.DatasetCreator([X])  # type: ignore[arg-type]
