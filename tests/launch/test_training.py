"""A training job whose processes fail is restarted, and ends as if nothing had happened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib, os, signal, sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import distribute_jax as dj

folder, fault = sys.argv[1:]
strategy = dj.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

def train_step(x):
    loss = lambda model: dj.compute_average_loss(jnp.sum(model(x) ** 2, axis=-1))
    gradients = nnx.grad(loss)(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("sum", gradients))

x = np.random.default_rng(0).normal(size=(20, 8, 3)).astype(np.float32)
batches = strategy.distribute_dataset(list(x))
leaves, structure = jax.tree.flatten(nnx.state((model, optimizer)))
file = os.path.join(folder, "state.npz")
done = 0
if os.path.exists(file):
    with np.load(file) as saved:
        done = int(saved["done"])
        new = [jnp.asarray(saved[str(i)], leaf.dtype) for i, leaf in enumerate(leaves)]
    nnx.update((model, optimizer), jax.tree.unflatten(structure, new))

def save(step):  # by one process; the library's checkpoints are tested elsewhere
    held = jax.tree.leaves(nnx.state((model, optimizer)))
    values = {str(i): np.asarray(leaf) for i, leaf in enumerate(held)}
    if dj.is_chief():
        np.savez(file + ".part.npz", done=step, **values)
        os.replace(file + ".part.npz", file)

for step, batch in enumerate(batches):
    if step < done:
        continue
    dj.report_step(step)
    if step in (7, 13) and os.environ["DISTRIBUTE_JAX_PROCESS_ID"] == "1" and done < step - 3:
        if fault == "raise":
            raise ValueError("bad batch")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(train_step, args=(batch,))
    if step % 5 == 4:
        save(step + 1)
kernel = np.asarray(model.kernel[...])
print("weights", hashlib.sha256(kernel.tobytes()).hexdigest())
"""


def launched(tmp_path, fault, *options):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    (tmp_path / fault).mkdir()
    command = [sys.executable, "-m", "distribute_jax", "launch", "--processes=2", *options]
    return subprocess.run(
        [*command, "--devices-per-process=1", str(script), str(tmp_path / fault), fault],
        capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
    )  # fmt: skip


def test_kills_leave_no_trace_in_the_weights(tmp_path):
    """Killed at two steps and restarted from the checkpoint, the weights are bitwise the same."""
    undisturbed = launched(tmp_path, "none")
    killed = launched(tmp_path, "kill")
    said = [line for line in killed.stderr.splitlines() if line.startswith("distribute-jax: ")]
    assert killed.returncode == undisturbed.returncode == 0, killed.stderr
    assert [re.search(r"SIGKILL at step (\d+)", line)[1] for line in said] == ["7", "13"]
    weights = re.findall(r"weights (\w+)", undisturbed.stdout + killed.stdout)
    assert len(weights) == 4
    assert set(weights) == {weights[0]}


@pytest.mark.exhaustive
def test_the_exception_of_one_process_is_the_last_line(tmp_path):
    """And nothing that the others print afterwards."""
    done = launched(tmp_path, "raise", "--max-restarts=0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "process 1 " in last
    assert "failed with ValueError: bad batch (exit code 1) at step 7" in last
