"""``distribute-jax explain`` prints what docs/errors.md says, and long messages name it."""

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
