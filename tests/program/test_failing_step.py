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


READING = """
import distribute_jax as dj
dj.simulate({devices})
import time
import jax, jax.numpy as jnp, numpy as np

strategy = dj.MirroredStrategy()

def answer(_):
    raise RuntimeError("boom")

def failing_step():
    value = jax.pure_callback(answer, jax.ShapeDtypeStruct((1,), np.float32), 1.0)
    return value, dj.get_replica_context().all_reduce("sum", value)

def fine():
    return jnp.ones(())

def report(read):
    try:
        read()
    except dj.StepFailedError as error:
        print("CAUGHT", str(error).replace(chr(10), " "))

def later_runs():
    for _ in range(3):
        strategy.run(fine)

def run_and(read):
    def both():
        results = strategy.run(failing_step)
        time.sleep(0.5)  # a failure is told by whoever looks after it has happened
        for result in results:
            report(lambda: read(result))
    report(both)

run_and(lambda result: strategy.reduce("sum", result))
run_and(lambda result: strategy.gather(result, axis=0))
run_and(lambda result: strategy.experimental_local_results(result))
run_and(lambda result: print("CAUGHT", result) if isinstance(result, dj.PerReplica) else None)
run_and(lambda result: later_runs())
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_whoever_reads_the_results_of_a_failed_step_is_told_its_name(devices: int):
    done = subprocess.run(
        [sys.executable, "-c", READING.format(devices=devices)],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    caught = [line for line in done.stdout.splitlines() if line.startswith("CAUGHT")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(caught) >= 5, done.stdout
    assert all("failing_step" in line and "boom" in line for line in caught), caught
