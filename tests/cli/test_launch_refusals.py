"""Programs that cannot be launched are refused at once, with the next thing to type."""

from __future__ import annotations

import pytest

from distribute_jax.cli import main

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
