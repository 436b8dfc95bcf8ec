"""``LocalCluster`` runs a function in real processes; failures are bounded and reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import cluster_functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.testing import Fault, LocalCluster

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same in IPv6, and ::1, as the kernel's tables show them."""


@pytest.mark.exhaustive
def test_two_processes_with_two_devices_each_compute_together():
    """Over gloo on loopback, with JAX alone; values, output and exit codes are returned."""
    results = LocalCluster(2, 2, timeout=60).run(
        cluster_functions.add_up, {"factor": np.float32(2)}
    )
    for i, result in enumerate(results):
        assert result.value["total"] == np.float32(2 * (0 + 1 + 10 + 11))
        assert result.value["devices"] == (4, 2)
        assert set(result.value["listeners"]) <= LOOPBACK, "something listens beyond loopback"
        assert (result.process, result.exit_code, result.signal) == (i, 0, None)
        assert f"hello from {i}" in result.stdout
        assert "and this is stderr" in result.stderr
        assert 0 < result.seconds < 60
    assert results[0].value["listeners"], "the coordinator listens"


@pytest.mark.exhaustive
def test_arguments_environment_and_results_are_passed():
    value = {
        "a": [1, None, (True, "x", float("inf"))],
        "b": np.arange(6, dtype="i2").reshape(2, 3),
        "c": jnp.ones((2, 0), jnp.bfloat16),
        "d": np.float64(0.5),
        "e": Fault("kill", process=3, at_step=1),
    }
    cluster = LocalCluster(2, 1, environment=[{}, {"COLOUR": "red"}])
    for i, result in enumerate(cluster.run(cluster_functions.plain, value)):
        back, process, colour = result.value
        assert (process, colour) == (str(i), [None, "red"][i])
        assert back["a"] == value["a"]
        assert type(back["a"][2]) is tuple
        assert type(back["d"]) is np.float64
        assert back["e"] == value["e"]
        for name in "bc":
            assert type(back[name]) is np.ndarray
            np.testing.assert_array_equal(back[name], np.asarray(value[name]), strict=True)


ENDINGS = {
    "kill": (None, "SIGKILL", False),
    "terminate": (None, "SIGTERM", False),
    **dict.fromkeys(("stop", "stall", "hold_gil"), (None, "SIGKILL", True)),
    "raise": (1, None, False),
}


@pytest.mark.exhaustive
def test_each_fault_happens_in_its_process_at_its_step():
    """All kinds at once, one in each process, within a bounded time."""
    faults = [Fault(kind, process=i, at_step=3) for i, kind in enumerate(ENDINGS)]
    faults += [Fault("delay", process=6, at_step=2, seconds=0.5)]
    faults += [Fault("stop", process=7, at_step=2, seconds=0.5)]
    began = time.monotonic()
    results = LocalCluster(8, 1, timeout=20, grace=None).run(
        cluster_functions.count, 5, 0.01, faults=faults, check=False
    )
    assert time.monotonic() - began < 30
    for result, (kind, wanted) in zip(results, ENDINGS.items(), strict=False):
        assert (result.exit_code, result.signal, result.ended_by_cluster) == wanted, kind
        assert (result.step, result.value) == (3, None), kind
    stacks = {kind: result.stderr for kind, result in zip(ENDINGS, results, strict=False)}
    assert "in _stall" in stacks["stall"]
    assert "in _hold_gil" in stacks["hold_gil"], "the stacks are printed with the lock held, too"
    assert "RuntimeError: injected by Fault('raise'" in stacks["raise"].replace("kind=", "")
    for result in results[6:]:
        assert (result.exit_code, result.value) == (0, 5)


@pytest.mark.exhaustive
def test_a_failure_raises_with_the_output_of_every_process(tmp_path):
    """The process that failed by itself comes first; the others are killed after the grace."""
    faults = [Fault("raise", process=1, at_step=9), Fault("stall", process=0, at_step=1)]
    began = time.monotonic()
    with pytest.raises(dj.ProcessFailedError) as error:
        LocalCluster(2, 1, timeout=60, grace=0.5).run(
            cluster_functions.count_together, str(tmp_path), 2, 20, faults=faults
        )
    assert time.monotonic() - began < 30
    title, first, *rest = str(error.value).splitlines()
    assert title == "LocalCluster.run(count_together): 2 of 2 processes failed."
    assert first.startswith("process 1: exit code 1 at step 9 after ")
    assert "RuntimeError: injected by Fault('raise'" in "\n".join(rest).replace("kind=", "")
    other = next(line for line in rest if line.startswith("process 0"))
    assert other.startswith("process 0: ended by SIGKILL, sent by the cluster at step 1 after ")
    assert any("_stall" in line for line in rest[rest.index(other) :])


def _nested():
    def inner():
        return 1

    return inner


REFUSED = {
    "no process": (lambda: LocalCluster(0, 1), ValueError, "processes must be .* got 0"),
    "no device": (lambda: LocalCluster(1, True), ValueError, "devices_per_process must be"),
    "no time": (
        lambda: LocalCluster(1, 1, timeout=0),
        ValueError,
        "timeout must be a number above 0; got 0",
    ),
    "environments": (
        lambda: LocalCluster(2, 1, environment=[{}]),
        ValueError,
        "one for each process",
    ),
    "lambda": (lambda: LocalCluster(1, 1).run(lambda: 1), ValueError, "at the top level"),
    "nested": (lambda: LocalCluster(1, 1).run(_nested()), ValueError, "at the top level"),
    "argument": (
        lambda: LocalCluster(1, 1).run(_nested, lambda: 1),
        TypeError,
        r"LocalCluster.run: fn and args must be .* what pickle can copy; got",
    ),
    "random keys": (
        lambda: LocalCluster(1, 1).run(_nested, jax.random.key(0)),
        TypeError,
        "what pickle can copy",
    ),
    "fault elsewhere": (
        lambda: LocalCluster(1, 1).run(_nested, faults=[Fault("kill", process=1, at_step=0)]),
        ValueError,
        "from 0 to 0",
    ),
    "kind": (
        lambda: Fault("explode", process=0, at_step=0),
        ValueError,
        "one of 'kill', 'terminate'",
    ),
    "never": (lambda: Fault("kill", process=0), ValueError, "one of at_step"),
    "twice": (
        lambda: Fault("kill", process=0, at_step=1, at_phase="a"),
        ValueError,
        "one of at_step",
    ),
    "no length": (lambda: Fault("delay", process=0, at_step=1), ValueError, "must have seconds"),
    "length": (lambda: Fault("kill", process=0, at_step=1, seconds=1), ValueError, "only for stop"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_before_a_process_starts(case):
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text) as error:
        call()
    assert isinstance(error.value, dj.DistributeError)


SCRIPT = """
import sys
import distribute_jax as dj

class Folder(str):
    pass

def report(folder):
    import os, subprocess, time
    held = subprocess.Popen(["sleep", "1000"])
    with open(os.path.join(folder, str(os.getpid())), "w") as file:
        file.write(str(held.pid))
    dj.report_step(0)
    time.sleep(1000)

if __name__ == "__main__":
    dj.testing.LocalCluster(2, 1).run(report, Folder(sys.argv[1]))
"""


@pytest.mark.exhaustive
def test_no_process_outlives_the_one_that_started_it(tmp_path):
    """Not even if that one is killed; and a script may define what it runs and passes."""
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(SCRIPT)
    started.mkdir()
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(started)], env={**os.environ, "PYTHONPATH": root}
    )
    try:
        _until(lambda: len([f for f in started.iterdir() if f.read_text()]) == 2, 60)
        processes = [int(file.name) for file in started.iterdir()]
        assert all(map(_is_alive, processes))
    finally:
        parent.kill()
        parent.wait()
        for file in started.iterdir():
            os.kill(int(file.read_text()), 9)
    _until(lambda: not any(map(_is_alive, processes)), 2)


def _until(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.local_cluster(1, 3, timeout=50)
def test_the_fixture_gives_the_cluster_of_the_mark(local_cluster):
    """Without a mark it has two processes with two devices each."""
    assert (local_cluster._processes, local_cluster._devices, local_cluster._timeout) == (1, 3, 50)


@pytest.mark.exhaustive
def test_without_a_mark_the_fixture_has_two_processes(local_cluster):
    """With two devices each."""
    assert (local_cluster._processes, local_cluster._devices) == (2, 2)
