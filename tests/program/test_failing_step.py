"""A compiled step that fails while it runs: the error names it, and the strategy can be used further."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import distribute_jax as dj
dj.simulate(4)
import jax, jax.numpy as jnp, numpy as np
from flax import nnx

def answer(_):
    if fails:
        raise RuntimeError("boom")
    return np.float32(1)

for strategy in (dj.MirroredStrategy([0]), dj.MirroredStrategy(), dj.CentralStorageStrategy()):
    with strategy.scope():
        weight = nnx.Variable(jnp.zeros(3))
    fails = True

    def step():
        value = jax.pure_callback(answer, jax.ShapeDtypeStruct((), np.float32), 1.0)
        weight[...] += dj.get_replica_context().all_reduce("mean", value)
        return value

    try:
        for _ in range(4):
            strategy.run(step)
    except dj.StepFailedError as error:
        print("CAUGHT", strategy.num_replicas_in_sync, str(error).replace(chr(10), " "))
"""


READING = """
import threading, time

answered = threading.Event()

def answer(_):
    answered.set()
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
        answered.clear()
        results = strategy.run(failing_step)
        answered.wait(60)
        time.sleep(0.5)  # the failure reaches the results a moment later
        for result in results:
            report(lambda: read(result))
    report(both)

for strategy in (dj.MirroredStrategy([0]), dj.MirroredStrategy([0, 1])):
    print("CAUGHT with", strategy.num_replicas_in_sync)
    run_and(lambda result: strategy.reduce("sum", result))
    run_and(lambda result: strategy.gather(result, axis=0))
    run_and(lambda result: strategy.experimental_local_results(result))
    run_and(lambda result: print("CAUGHT", result) if isinstance(result, dj.PerReplica) else None)
    run_and(lambda result: later_runs())
"""


@pytest.fixture(scope="module")
def caught() -> list[str]:
    """The lines that both programs print of their errors; one process runs both, to start JAX once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + READING],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("CAUGHT")]


@pytest.mark.exhaustive
def test_a_step_that_fails_while_running_names_the_lost_state(caught: list[str]):
    """At the latest a later call raises, since steps run in the background."""
    lost = caught[: caught.index("CAUGHT with 1")]
    assert [line.split()[1] for line in lost] == ["1", "4", "4"]
    for line in lost:
        assert "step: The compiled step failed" in line
        assert "weight" in line
        assert "boom" in line
        assert "dj.snapshot" in line


@pytest.mark.exhaustive
def test_reading_the_result_of_a_failed_step_names_the_step(caught: list[str]):
    first, second = (caught.index(f"CAUGHT with {n}") for n in (1, 2))
    for lines in (caught[first + 1 : second], caught[second + 1 :]):
        assert len(lines) >= 5, caught
        assert all("failing_step" in line and "boom" in line for line in lines), caught
