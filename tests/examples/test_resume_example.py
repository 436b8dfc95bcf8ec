"""The training that may be killed at any moment: what it ends with, and what it had to do again."""

from __future__ import annotations

import random
import re
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from example_program import command, environment, output
from flax import nnx

import distribute_jax as dj
from examples import resume

STEPS = 40


def weights(model: resume.Network) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.exhaustive
def test_a_training_in_two_parts_ends_with_the_weights_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut in the second pass over the data, which is in another order than the first."""
    strategy = dj.MirroredStrategy([0, 1])
    whole = resume.train(strategy, str(tmp_path / "whole"), steps=30, every=30)
    resume.train(strategy, str(tmp_path / "parts"), steps=25, every=30)
    parts = resume.train(strategy, str(tmp_path / "parts"), steps=30, every=30)
    assert all(map(np.array_equal, weights(parts), weights(whole)))
    assert resume.digest(parts) == resume.digest(whole)
    assert capsys.readouterr().out.count("Resuming after step 25.") == 1


def test_the_digest_differs_with_any_bit() -> None:
    """So that equal digests mean equal weights."""
    model = resume.Network(nnx.Rngs(0))
    before = resume.digest(model)
    bias = np.asarray(model.head.bias[...]).copy()
    bias.view(np.uint32)[3] ^= 1
    model.head.bias[...] = bias
    assert resume.digest(model) != before


def killed_at(step: int, folder: Path) -> None:
    """Starts the program and kills it when it says that it came to a step, or later."""
    with subprocess.Popen(
        command("resume", "--steps", STEPS, "--every", 3),
        env=environment(), cwd=folder, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        for line in program.stdout:
            found = re.match(r"step (\d+)/", line)
            if found and int(found[1]) >= step:
                break
        program.send_signal(signal.SIGKILL)
        program.wait(timeout=60)
    assert program.returncode == -signal.SIGKILL


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [1, 2])
def test_a_program_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at random steps; the last line, with the digest of all weights, is the same."""
    # The three or four programs compile the same: once is enough.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    undisturbed = output("resume", "--steps", STEPS, "--every", 3, folder=whole).splitlines()
    moments = random.Random(0)
    for i in range(kills):
        killed_at(moments.randrange(10 * i, 10 * i + 20), cut)
    last = output("resume", "--steps", STEPS, "--every", 3, folder=cut).splitlines()
    assert undisturbed[0] == "Resuming after step 0."
    assert re.match(r"Resuming after step [1-9]", last[0]), "it started over"
    assert last[-1] == undisturbed[-1]
    assert re.fullmatch(rf"Weights after step {STEPS}: [0-9a-f]{{16}}", last[-1])
