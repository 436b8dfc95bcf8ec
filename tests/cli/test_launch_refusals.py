"""What cannot be launched is refused at once, with the next thing to type."""

from __future__ import annotations

import pytest

from distribute_jax.cli import main

REFUSED = {
    "a module": (["-m", "nope_nowhere.mod"], "no module 'nope_nowhere.mod'"),
    "a folder": (["{folder}"], "no __main__.py in"),
    "a file": (["nope.py"], "no file 'nope.py'"),
    "nobody to meet": (
        ["--coordinator=a:1", "-m", "this"],
        "there is nobody to meet. Give --nodes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_program_that_nobody_can_run_is_refused_before_a_process_starts(case, tmp_path, capfd):
    """The exit code is 1, and the line says what is wrong."""
    arguments, text = REFUSED[case]
    assert main(["launch", *(a.format(folder=tmp_path) for a in arguments)]) == 1
    assert text in capfd.readouterr().err


def test_a_wrong_option_shows_the_usage_of_its_command(capsys):
    """Not that of all commands, which has none of its options."""
    with pytest.raises(SystemExit):
        main(["launch", "--nope", "train.py"])
    assert "usage: distribute-jax launch" in capsys.readouterr().err
