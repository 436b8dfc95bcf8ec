"""``steps_per_execution="auto"`` measures the best number, and changes no result."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx
from leaves import assert_close
from model_factory import compile_model, linear

import distribute_jax as dj
from distribute_jax.training import _trainer
from distribute_jax.training._trainer import StepsPerExecution


@pytest.mark.parametrize(
    ("dispatch", "batch", "size"),
    [
        (1e-3, 1.0, 1),  # a dispatch costs nothing beside a batch
        (0.2, 1.0, 2),  # 1.2, 1.1 and 1.05 s a batch: 8% less, then 4.5% less
        (1.0, 1e-6, 32),  # the dispatch is all there is
    ],
)
def test_the_number_doubles_while_it_is_worthwhile(
    dispatch: float, batch: float, size: int, monkeypatch: pytest.MonkeyPatch
):
    """A dispatch costs a fixed time, and each batch another."""
    now = [0.0]
    monkeypatch.setattr(_trainer.time, "perf_counter", lambda: now[0])
    steps = StepsPerExecution("auto", wait=lambda: None)
    for _ in range(1000):
        now[0] += dispatch + batch * steps.size
        steps.note(steps.size)
    assert (steps.size, steps.is_settled) == (size, True)


def test_the_remainder_of_an_epoch_is_not_measured():
    steps = StepsPerExecution("auto", wait=lambda: None)
    steps.size = 4
    steps.note(3)
    assert steps._started is None


def test_fit_measures_and_ends_at_the_same_weights(
    s4: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_trainer, "_WORTHWHILE", 1e9)
    monkeypatch.setattr(_trainer, "_MEASURED_SECONDS", 0.0)
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    models = []
    for steps in (1, "auto"):
        model = compile_model(s4, linear(3), steps_per_execution=steps)
        model.fit(x, y, batch_size=8, epochs=12, shuffle=False, verbose=0)
        models.append(model)
    assert models[1].trainer.steps_per_execution("train").size >= 8
    assert_close(*(nnx.state(model.module) for model in models), rtol=1e-6)
