"""Jobs that fail before they make progress: in the first compilation, or in a restore."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib, os, sys
import jax, numpy as np, optax
from flax import nnx
import distribute_jax as dj
from distribute_jax.processes._status import status_writer
from distribute_jax.testing._local_cluster import Fault, Injector

directory, *faults = sys.argv[1:]  # for each attempt: kind, process, and the phase or the step; or nothing
attempt = int(os.environ["DISTRIBUTE_JAX_ATTEMPT"])
kind, process, when = faults[attempt].split(":") if attempt < len(faults) else "---"
if process == os.environ["DISTRIBUTE_JAX_PROCESS_ID"]:
    moment = {"at_step": int(when)} if when.isdigit() else {"at_phase": when}
    status_writer().listen(Injector([Fault(kind, process=int(process), **moment)]))

strategy = dj.MultiWorkerMirroredStrategy()
with strategy.scope():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

def train_step(x):
    loss = lambda model: dj.compute_average_loss((model(x) ** 2).sum(axis=-1))
    gradients = nnx.grad(loss)(model)
    optimizer.update(model, dj.get_replica_context().all_reduce("sum", gradients))

source = dj.data.from_arrays(np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32))
batches = iter(strategy.distribute_dataset(source.shuffle(seed=1).batch(8).repeat(2)))
state = {"model": model, "optimizer": optimizer, "data": batches}
with dj.CheckpointManager(directory, every_steps=4) as manager:
    done = manager.restore_latest(state) or 0
    for step in range(done + 1, 17):  # nothing here says which step it is
        strategy.run(train_step, args=(next(batches),))
        manager.save(step, state) and manager.wait()  # so that what is restored is known
digest = hashlib.sha256(repr(batches.state()).encode())
for leaf in jax.tree.leaves(nnx.state((model, optimizer))):
    raw = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    digest.update(np.asarray(raw.addressable_data(0)).tobytes())
print("weights", digest.hexdigest())
"""


def launched(folder: Path, *faults: str, code: int = 0) -> tuple[list[str], list[str]]:
    """Returns the digest of what each process has at the end, and the output of the supervisor."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    options = ["--processes=2", "--devices-per-process=1", "--max-pause=0.1"]
    options += ["--max-restarts=0"] * (code != 0)
    program = [str(folder / "train.py"), str(folder / "steps"), *faults]
    done = subprocess.run(
        [sys.executable, "-m", "distribute_jax", "launch", *options, *program],
        capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("distribute-jax: ")]
    assert code == 0 or done.stderr.splitlines()[-1] == said[-1], "nobody prints afterwards"
    return re.findall(r"weights (\w+)", done.stdout), said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the weights of an uninterrupted job."""
    weights, said = launched(tmp_path_factory.mktemp("undisturbed") / "job")
    assert said == []
    assert len(weights) == 2
    assert len(set(weights)) == 1
    return weights


def test_killed_in_a_restore_the_weights_are_the_same(
    undisturbed: list[str], tmp_path: Path
) -> None:
    """Process 1 at step 9, then while it restores step 8; only the restore reports the step."""
    weights, said = launched(tmp_path / "job", "kill:1:9", "kill:1:restoring")
    assert weights == undisturbed
    first, second = said
    assert "SIGKILL at step 9" in first
    assert "restoring" in second
    assert "(restart 2; 1 of 3 allowed without progress)" in second


def test_kills_before_progress_count_as_none(undisturbed: list[str], tmp_path: Path) -> None:
    """Either process, while step 1 compiles and in restores, with progress in between."""
    kills = ["0:compiling", "1:compiling", "1:6", "0:restoring"]
    kills += ["1:compiling", "0:11", "1:restoring"]
    weights, said = launched(tmp_path / "job", *(f"kill:{kill}" for kill in kills))
    assert weights == undisturbed
    spent = [int(re.search(r"; (\d) of 3 allowed", line)[1]) for line in said]
    # A restart that is killed as it compiles or restores brings nothing; one that gets further does.
    assert spent == [0, 1, 0, 1, 2, 0, 1]
    assert all("compiling train_step" in said[i] for i in (0, 1, 4))
    assert all("restoring" in said[i] for i in (3, 6))
    assert "at step 11" in said[5], "counted behind the step that was restored"


def test_the_exception_of_one_process_is_the_last_line(tmp_path: Path) -> None:
    _, said = launched(tmp_path / "job", "raise:1:7", code=1)
    assert re.search(
        r"process 1 .* RuntimeError: injected by .*\(exit code 1\) at step 7", said[-1]
    )
