"""``distribute-jax plan`` prints what the first step of a program needs, and runs no step."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from distribute_jax.cli import main

PROGRAM = """
import sys
import distribute_jax as dj
dj.simulate(2)
import numpy as np, optax
from flax import nnx
from other import SIZE
assert sys.argv[1:] == ["--x"] and __name__ == "__main__"
with dj.MirroredStrategy().scope():
    model = dj.Model(nnx.Linear(SIZE, 64, rngs=nnx.Rngs(0)))
    model.compile(optax.sgd(0.1), dj.losses.MeanSquaredError())
model.fit(np.ones((8, SIZE), np.float32), np.ones((8, 64), np.float32), batch_size=8, verbose=0)
print("ran")
"""


@pytest.mark.exhaustive
def test_the_first_step_of_a_program_is_planned_and_not_run(tmp_path: Path) -> None:
    """A script beside a module that it imports, with arguments, for two numbers of replicas."""
    (tmp_path / "other.py").write_text("SIZE = 64\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = ["plan", "--replicas", "2,64", "--memory", "1", str(tmp_path / "train.py"), "--x"]
    done = subprocess.run(
        [sys.executable, "-m", "distribute_jax", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.endswith("fits 1 GiB")
    assert [row.split()[:2] for row in rows] == [
        ["MirroredStrategy", "2"],
        ["MirroredStrategy", "64"],
    ]


@pytest.mark.parametrize(
    ("text", "error"), [(None, "no file"), ("", "has ended without")], ids=["missing", "no step"]
)
def test_a_program_without_a_step_is_an_error(text, error, tmp_path, capfd, monkeypatch) -> None:
    """One line, and exit code 1."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    assert main(["plan", str(tmp_path / "train.py")]) == 1
    assert error in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--replicas=8,x", "--replicas=0", "--memory=nan", "--memory=0"])
def test_a_number_that_cannot_be_is_refused_by_the_name_of_its_option(option, tmp_path, capfd):
    """The last line has the option, what it takes and what was received; the program does not run."""
    (tmp_path / "train.py").write_text("print('ran')")
    with contextlib.suppress(SystemExit):
        assert main(["plan", option, str(tmp_path / "train.py")]) == 1
    out, err = capfd.readouterr()
    name, _, value = option.partition("=")
    last = err.splitlines()[-1]
    assert (out, name in last, value.split(",")[-1] in last) == ("", True, True)
    assert "an integer >= 1" in last or "a number above 0" in last
