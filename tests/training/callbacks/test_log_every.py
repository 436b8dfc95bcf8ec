"""``LogEvery``, and the logs of a user's step while an epoch runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from tests.training.model_factory import compile_model, linear

X = np.arange(1.0, 13.0, dtype=np.float32).reshape(12, 1)


class Counting(dj.Model):
    def train_step(self, batch: Any) -> Any:
        return {"sum": jnp.sum(batch[0])}


def test_every_second_batch_is_logged(s2: dj.Strategy, capsys: pytest.CaptureFixture[str]):
    """Steps continue over the epochs; a user's step logs its means so far, without metrics."""
    with s2.scope():
        model = Counting(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse", metrics=["mae"])
    data = [(x,) for x in np.split(X, 3)]
    model.fit(data, epochs=2, callbacks=[dj.callbacks.LogEvery(2)], verbose=0)
    lines = ["Step 2 - sum: 18.0000", "Step 4 - sum: 10.0000", "Step 6 - sum: 26.0000"]
    assert capsys.readouterr().out.splitlines() == lines
    with pytest.raises(dj.ArgumentError, match="LogEvery: batches must be an integer >= 1"):
        dj.callbacks.LogEvery(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [1, -1])
def test_steps_continue_in_the_middle_of_an_epoch(
    order: int, s2: dj.Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """After an interruption, whichever callback comes first."""
    for interrupted in (True, False):
        model = compile_model(s2, linear(1))
        saves = dj.callbacks.BackupAndRestore(tmp_path, save_freq=2)
        after = dj.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, raises=interrupted: 1 / (batch < 2 or not raises)
        )
        callbacks = [saves, dj.callbacks.LogEvery(1)][::order]
        try:
            model.fit(X, X, batch_size=2, callbacks=[*callbacks, after], verbose=0)
        except ZeroDivisionError:
            assert interrupted
        steps = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [3, 4, 5, 6]
