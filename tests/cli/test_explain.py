"""``distribute-jax explain`` prints what the page of errors says, and long messages name it."""

from __future__ import annotations

import pytest

import distribute_jax as dj
from distribute_jax.cli import main

ERRORS = [name for name in dj.__all__ if name.endswith("Error") and name != "DistributeError"]


def test_every_error_has_a_line_in_the_list(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == sorted(ERRORS)
    assert all(len(line.split(": ", 1)[1]) > 20 for line in lines)


@pytest.mark.parametrize("asked", ["OutOfSyncError", "distribute_jax.OutOfSyncError", "outofsync"])
def test_an_error_is_explained_with_cause_cure_and_example(asked, capsys):
    assert main(["explain", asked]) == 0
    text = capsys.readouterr().out
    for part in ("OutOfSyncError (`ValueError`)", 'all_reduce("sum"', "docs/how_run", "    >>> "):
        assert part in text


def test_the_nearest_name_is_suggested(capfd):
    assert main(["explain", "OutOfSnycError"]) == 1
    assert "Did you mean OutOfSyncError?" in capfd.readouterr().err


def test_a_message_of_several_lines_names_the_command_once():
    """Also that of an error that repeats the text of another; those about arguments are left as they are."""
    text = "one\ntwo"
    assert str(dj.OutOfSyncError(text)) == (
        "one\ntwo\nMore on this error: distribute-jax explain OutOfSyncError"
    )
    assert str(dj.StepFailedError(str(dj.OutOfSyncError(text)))) == str(dj.OutOfSyncError(text))
    assert str(dj.ArgumentTypeError(text)) == text
    assert str(dj.OutOfSyncError("one")) == "one"
