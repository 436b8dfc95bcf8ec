"""Jobs that are killed and stopped repeatedly end with the weights of an uninterrupted job.

``pytest -m exhaustive -s tests/launch/test_endurance.py`` prints the figures of the report in
``benchmarks/reports``; ``ENDURANCE=100`` before it sets the number of kills, of which 20 are the default.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(sys.platform != "linux", reason="/proc")]

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("ENDURANCE", "20"))
PROGRAM = """
import hashlib, os, sys, time
print("pid", os.getpid(), flush=True)
import jax, numpy as np, optax
from flax import nnx
import distribute_jax as dj

directory, kind, steps, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
strategy = dj.MultiWorkerMirroredStrategy()
with strategy.scope():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, width, rngs=rngs), nnx.Dropout(0.5, rngs=rngs),
                           nnx.Linear(width, 2, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    checked = dj.Variable(0.0)

def train_step(x):
    loss = lambda model: dj.compute_average_loss((model(x) ** 2).sum(axis=-1))
    gradients = nnx.grad(loss)(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("sum", gradients))

def evaluate(x):
    checked.assign(dj.get_replica_context().all_reduce("sum", (model(x) ** 2).sum()))

rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
if kind == "arrays":
    source = dj.data.from_arrays(rows).shuffle(seed=1).batch(8).repeat(steps // 8)
elif kind == "grain":
    import grain
    source = grain.MapDataset.source(rows).seed(1).shuffle().batch(8).repeat(steps // 8)
else:
    import tensorflow as tf
    source = tf.data.Dataset.from_tensor_slices(rows)
    source = source.shuffle(64, seed=1, reshuffle_each_iteration=False).batch(8).repeat(steps // 8)
batches = iter(strategy.distribute_dataset(source))
every = 1 if width > 100 else 10
state = {"model": model, "optimizer": optimizer, "checked": checked}
print("compiling", flush=True)
with dj.CheckpointManager(directory, every_steps=every, max_to_keep=3) as manager, \\
        manager.preemptible(state, batches) as loop:
    print("continues after", loop.step, flush=True)
    for x in batches:
        if loop.step == 1:
            print("first step", flush=True)
        strategy.run(train_step, args=(x,))
        if loop.step % 10 == 5:
            print("evaluating", loop.step, flush=True)
            strategy.run(evaluate, args=(x,))
        time.sleep(0.02)
digest = hashlib.sha256(repr(batches.state()).encode())
for leaf in jax.tree.leaves(nnx.state((model, optimizer))):
    raw = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    digest.update(np.asarray(raw.addressable_data(0)).tobytes())
print("weights", loop.step, digest.hexdigest(), flush=True)
"""


class Run:
    """A job under the launcher, whose output is read while it runs."""

    def __init__(self, folder, kind="arrays", steps=160, width=8):
        folder.mkdir(exist_ok=True, parents=True)
        script = folder / "train.py"
        script.write_text(PROGRAM)
        options = [
            "--processes=2",
            "--devices-per-process=2",
            "--max-restarts=1000",  # on a busy machine many kills in a row come before the next save
            "--max-pause=0.1",
        ]
        arguments = [str(script), str(folder / "steps"), kind, str(steps), str(width)]
        self.began, self.lines, self.pids = time.monotonic(), [], {}
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distribute_jax", "launch", *options, *arguments],
            cwd=ROOT, env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        with self.process.stdout as output:
            for line in output:
                self._take(line)

    def _take(self, line):
        with self.changed:
            self.lines.append(line.rstrip())
            if found := re.match(r"\[(\d)\] pid (\d+)", line):
                self.pids[int(found[1])] = int(found[2])
            self.changed.notify_all()

    def await_line(self, text, count=1):
        def there():
            return sum(text in line for line in self.lines) >= count

        with self.changed:
            assert self.changed.wait_for(there, timeout=120), self.lines[-20:]

    def end(self, code=0):
        """Waits for the end, and returns the weights that each process printed."""
        assert self.process.wait(timeout=300 + 10 * KILLS) == code, "\n".join(self.lines[-30:])
        self.reader.join()
        return {line.partition("weights ")[2] for line in self.lines if "weights " in line}

    def usage(self):
        """Returns what the supervisor and the larger of the processes use, and the folders of the job."""
        supervisor, *ranks = map(usage_of, (self.process.pid, *self.pids.values()))
        figures = {f"supervisor, {unit}": supervisor[unit] for unit in supervisor}
        figures |= {f"processes, {unit}": max(rank[unit] for rank in ranks) for unit in supervisor}
        return {**figures, "temporary folders": len([*self.temporary.iterdir()])}


def usage_of(pid):
    """Returns memory, threads, descriptors and ports of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    opened = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            opened.add(os.readlink(descriptor))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in opened]
    return {
        "kB": int(re.search(r"VmRSS:\s+(\d+)", status)[1]),
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "listening ports": len(listening),
    }


@functools.cache
def undisturbed(kind="arrays", steps=160, width=8):
    """Returns the weights of an uninterrupted job."""
    with tempfile.TemporaryDirectory() as folder:
        (weights,) = Run(Path(folder), kind, steps, width).end()
    return {weights}


def kill_again_and_again(folder, kills, seed, name="SIGKILL", **what):
    """Sends a signal to one or both processes at random moments; returns the weights and what was used."""
    rng, used, seen, back = random.Random(seed), [], [], []
    run, ready = Run(folder, **what), "compiling" if name == "SIGKILL" else "continues after"
    for number in range(kills):
        run.await_line(ready, 2 * (number + 1))
        time.sleep(rng.uniform(0, 6 if number % 3 and name == "SIGKILL" else 1))
        if run.process.poll() is not None or any("weights" in line for line in run.lines):
            break
        used.append(run.usage())
        began = time.monotonic()
        for process in rng.choice([[0], [1], [0, 1]]):
            os.kill(run.pids[process], getattr(signal, name))
        run.await_line("restarting all", number + 1)
        seen.append(time.monotonic() - began)
        run.await_line(ready, 2 * (number + 2))
        back.append(time.monotonic() - began)
    weights = run.end()
    seconds = time.monotonic() - run.began
    print(f"\nendurance: {len(used)} times {name}, {what}, {seconds:.0f} s", flush=True)
    print(
        f"seen after {median(seen):.2f} s (most {max(seen):.2f}), back after {median(back):.1f} s"
    )
    assert len(used) > kills / 2
    assert sum("] pid " in line for line in run.lines) == 2 * (len(used) + 1), "one restart each"
    assert not any("damaged" in line for line in run.lines)
    assert [*run.temporary.iterdir()] == []
    most, saves = redone(run.lines)
    assert most <= 20, "two intervals: one save may be under way"
    assert saves == (0 if name == "SIGKILL" else len(used))
    return weights, used


def redone(lines):
    """Returns the most steps that were run again after a kill, and how often all had saved at one step."""
    most, saves, reached, starts = 0, 0, 0, []
    for line in lines:
        saves += "all processes have saved after a preemption" in line
        if found := re.search(r"SIGKILL at step (\d+)", line):
            reached = int(found[1])
        elif found := re.search(r"continues after (\d+)", line):
            starts.append(int(found[1]))
            most = max(most, reached - starts[-1])
            reached = 0
    assert starts[::2] == starts[1::2], "both processes continue at one step"
    return most, saves


def test_random_kills_leave_no_trace_and_nothing_grows(tmp_path):
    """Rank 0 included, in compiles, steps, evaluations, saves and restores."""
    steps = 40 * KILLS
    weights, used = kill_again_and_again(tmp_path, KILLS, seed=1, steps=steps)
    assert weights == undisturbed(steps=steps)
    half = len(used) // 2
    for what in used[0]:
        figures = [figure[what] for figure in used]
        early, late = max(figures[:half]), max(figures[half:])
        print(f"endurance: most {what}: {early} in the first half, {late} in the second")
        # A process that has just started has less than one that trains and saves.
        assert late <= early * (1.1 if "supervisor" in what else 2) + 1, figures


def test_sigterm_to_either_process_at_any_moment_saves_at_one_step(tmp_path):
    """20 of 20, in compiles, steps and evaluations; then all continue bitwise."""
    weights, _ = kill_again_and_again(tmp_path, KILLS, 5, "SIGTERM", steps=40 * KILLS)
    assert weights == undisturbed(steps=40 * KILLS)


@pytest.mark.parametrize("kind", ["grain", "tf"])
def test_other_sources_go_on_at_the_very_next_example(tmp_path, kind):
    """With Grain, and with tf.data if it is installed."""
    if not importlib.util.find_spec({"tf": "tensorflow"}.get(kind, kind)):
        pytest.skip(f"needs {kind}: dev.py test --sources has it")
    weights, _ = kill_again_and_again(tmp_path, 3, seed=2, kind=kind)
    assert weights == undisturbed(kind)


def test_either_of_two_processes_killed_in_a_save(tmp_path):
    """Each step is saved, and takes longer to save than to run."""
    kills = max(KILLS // 2, 5)
    steps = max(80, 12 * kills)  # the job ends after so many, whether or not all kills have come
    weights, _ = kill_again_and_again(tmp_path, kills, seed=3, steps=steps, width=200_000)
    assert weights == undisturbed(steps=steps, width=200_000)
    left = [path.name for path in (tmp_path / "steps").iterdir()]
    assert all(name.isdecimal() for name in left), left


STOPS = {
    "Ctrl-C in training": (signal.SIGINT, "evaluating"),
    "SIGTERM in evaluation": (signal.SIGTERM, "evaluating"),
    "SIGTERM while step 1 compiles": (signal.SIGTERM, "first step"),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_stopped_job_saves_at_one_step_and_goes_on(tmp_path, case):
    """Exit code 42, one step that both have saved, and then the weights of an uninterrupted job."""
    number, line = STOPS[case]
    run = Run(tmp_path)
    run.await_line(line, 2)
    time.sleep(0.3 if "training" in case else 0)
    run.process.send_signal(number)
    asked = time.monotonic()
    assert run.end(code=42) == set()
    print(f"\nendurance: {case}: saved and ended within {time.monotonic() - asked:.1f} s")
    assert run.lines[-1].endswith("all processes have saved and ended")
    assert Run(tmp_path).end() == undisturbed()


def test_no_process_outlives_a_killed_supervisor(tmp_path):
    """At three random moments; started again, the job continues, and the folders are removed."""
    rng = random.Random(4)
    for _ in range(3):
        run = Run(tmp_path)
        run.await_line("compiling", 2)
        time.sleep(rng.uniform(0, 4))
        run.process.kill()
        run.end(code=-9)  # its output has ended too, so nobody holds it
        assert [pid for pid in run.pids.values() if Path(f"/proc/{pid}/cmdline").exists()
                and Path(f"/proc/{pid}/cmdline").read_bytes()] == []  # fmt: skip
    assert Run(tmp_path).end() == undisturbed()
    assert [*run.temporary.iterdir()] == []
