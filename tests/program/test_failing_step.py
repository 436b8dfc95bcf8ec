"""A compiled step that fails while it runs: said by name, and the strategy works on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import distribute_jax as dj
dj.simulate({devices})
import jax, jax.numpy as jnp, numpy as np
from flax import nnx

strategy = dj.{strategy}()
with strategy.scope():
    weight = nnx.Variable(jnp.zeros(3))
fails = True

def answer(_):
    if fails:
        raise RuntimeError("boom")
    return np.float32(1)

def step():
    value = jax.pure_callback(answer, jax.ShapeDtypeStruct((), np.float32), 1.0)
    weight[...] += dj.get_replica_context().all_reduce("mean", value)
    return value

try:
    for _ in range(4):
        strategy.run(step)
except dj.StepFailedError as error:
    print("CAUGHT", str(error).replace(chr(10), " "))
"""


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("MirroredStrategy", 1), ("MirroredStrategy", 4), ("CentralStorageStrategy", 4)],
)
def test_a_step_that_fails_while_running_names_the_lost_state(strategy: str, devices: int):
    """A later call reports it at the latest, since steps run in the background."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(strategy=strategy, devices=devices)],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CAUGHT step: The compiled step failed" in done.stdout, done.stderr[-2000:]
    assert "weight" in done.stdout
    assert "boom" in done.stdout
    assert "dj.snapshot" in done.stdout
