"""What ``explain`` and ``plan`` print on the command line, and what ``launch`` and ``plan`` refuse."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import distribute_jax as dj
from distribute_jax.cli import main


def test_every_error_has_its_cause_and_its_cure(capsys):
    """Under its name, with the builtin errors that it is."""
    assert main(["explain"]) == 0
    names = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(["DistributeError", *names]) == [n for n in dj.__all__ if n.endswith("Error")]
    for name in names:
        bases = [base for base in getattr(dj, name).__bases__ if base is not dj.DistributeError]
        shown = ", ".join(f"`{base.__name__}`".replace("`JSON", "`json.JSON") for base in bases)
        assert main(["explain", f"distribute_jax.{name}"]) == 0
        assert capsys.readouterr().out.startswith(f"{name} ({shown}) ")


def test_the_page_of_the_package_is_that_of_the_documentation():
    """A link, which wheels have as a file, and editable installs not at all."""
    assert (Path(dj.__path__[0]) / "errors.md").samefile(
        Path(__file__).parents[2] / "docs/errors.md"
    )


def test_examples_are_printed_and_the_nearest_name_is_suggested(capfd):
    assert main(["explain", "outofsync"]) == 0
    assert "    >>> strategy.run(" in capfd.readouterr().out
    assert main(["explain", "OutOfSnycError"]) == 1
    assert "Did you mean OutOfSyncError?" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["one\ntwo", "one"])
def test_a_message_of_several_lines_names_the_command_once(text):
    """Also that of an error that repeats the text of another; those about arguments do not."""
    command = "\nMore on this error: distribute-jax explain OutOfSyncError" * ("\n" in text)
    assert str(dj.OutOfSyncError(text)) == text + command
    assert str(dj.StepFailedError(str(dj.OutOfSyncError(text)))) == text + command
    assert str(dj.ArgumentTypeError(text)) == text


REFUSED = {
    "a module": (["-m", "nope_nowhere.mod"], "no module 'nope_nowhere.mod'"),
    "a folder": (["{folder}"], "no __main__.py in"),
    "a file": (["nope.py"], "no file 'nope.py'"),
    "a path that is too long": (["a" * 5000], "no file 'aaa"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_program_that_cannot_run_is_refused_before_a_process_starts(case, tmp_path, capfd):
    """The exit code is 1, and one line says what is wrong."""
    arguments, text = REFUSED[case]
    assert main(["launch", *(a.format(folder=tmp_path) for a in arguments)]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("distribute-jax: ")
    assert text in line


@pytest.mark.parametrize("others", [[], ["-n2"], ["-n2", "--min-processes=2"]])
def test_rejoin_is_refused_where_no_process_may_be_missing(others, capfd):
    """It had no effect, and nothing said so."""
    assert main(["launch", *others, "--rejoin=5", __file__]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "--rejoin has no effect" in line
    assert "Add --min-processes K, with K below -n" in line


WRONG_OPTIONS = {
    "--nope": "unrecognized arguments: --nope",
    "--processes=0": "'0' is not an integer >= 1",
    "--nproc-per-node=0": "'0' is not an integer >= 1",
    "-n0": "'0' is not an integer >= 1",
    "-n100000": "100000 is above 1024, the most on one machine",
    "--devices-per-process=100000": "100000 is above 1024, the most on one machine",
    "--grace=-1": "'-1' is not a number of seconds",
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_a_wrong_option_shows_the_usage_of_its_command(option, capsys):
    with pytest.raises(SystemExit):
        main(["launch", option, "train.py"])
    error = capsys.readouterr().err
    assert "usage: distribute-jax launch" in error
    assert WRONG_OPTIONS[option] in error


@pytest.mark.parametrize("command", ["launch", "plan"])
def test_without_a_program_only_the_program_is_missing(command, capsys):
    with pytest.raises(SystemExit):
        main([command])
    assert capsys.readouterr().err.endswith("arguments are required: program\n")


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
