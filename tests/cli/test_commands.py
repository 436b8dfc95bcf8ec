"""``distribute-jax explain`` prints what docs/errors.md says; ``launch`` refuses what it cannot start."""

from __future__ import annotations

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
