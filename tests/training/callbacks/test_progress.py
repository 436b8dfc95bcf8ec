"""What the user sees while a model trains: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import re
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import distribute_jax as dj
from distribute_jax.training import _progress

LINE = re.compile(r"(.+) - (\d+) batch(?:es)? - [\d.]+ s - [\d,]+ examples/s(?: - (.+))?")


def lines(text: str) -> list[tuple[str, str, str | None]]:
    """Returns title, batches and numbers of every line."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [match.groups() for match in found]


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_a_line_for_each_epoch_without_a_terminal(
    example: Any, capsys: pytest.CaptureFixture[str], verbose: Any
):
    """With the numbers of training and validation."""
    example.fit(epochs=2, verbose=verbose, validation_data=(example.x, example.y), batch_size=4)
    shown = lines(capsys.readouterr().out)
    assert [line[:2] for line in shown] == [("Epoch 1/2", "2"), ("Epoch 2/2", "2")]
    assert re.fullmatch(r"loss: \d+\.\d{4} - val_loss: \S+", shown[0][2])


def test_evaluate_and_predict_print_a_line(example: Any, capsys: pytest.CaptureFixture[str]):
    """And silence where it is asked for."""
    example.model.evaluate(example.x, example.y, batch_size=8)
    example.model.predict(example.x, batch_size=2)
    assert lines(capsys.readouterr().out) == [
        ("evaluate", "1", "loss: 25.5000"),
        ("predict", "4", None),
    ]
    example.fit(verbose=0, validation_data=(example.x, example.y))
    example.model.evaluate(example.x, example.y, verbose=0)
    example.model.predict(example.x, verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verbose", [3, "yes", None])
def test_another_verbosity_is_refused(example: Any, verbose: Any):
    """The message says what there is."""
    with pytest.raises(ValueError, match=r"fit\(verbose\) must be one of 'auto', 0, 1, 2; got"):
        example.fit(verbose=verbose)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal that can be read; every batch is drawn."""
    console = Console(file=StringIO(), force_terminal=True, width=160, color_system=None)
    monkeypatch.setattr(_progress, "_drawing_console", lambda: console)
    monkeypatch.setattr(_progress, "BETWEEN", 0.0)
    return console


def test_a_bar_shows_batches_speed_and_numbers(example: Any, screen: Console):
    """The numbers are those of a batch or so before; the epoch's line stays."""
    example.fit(verbose=1, epochs=2, batch_size=2, x=np.tile(example.x, (8, 1)),
                y=np.tile(example.y, (8, 1)))  # fmt: skip
    text = screen.file.getvalue()
    assert re.search(r"Epoch 1/2.*━.* 7/32 [\d,]+ examples/s .*\d\d.*", text)
    assert re.search(r"Epoch 2/2.*32/32 .* loss: \d", text)
    assert len(re.findall(r"Epoch \d/2 - 32 batches - .* examples/s - loss: \d", text)) == 2
    assert text.endswith("\n")


def test_the_bar_never_waits_for_a_step(
    example: Any, screen: Console, monkeypatch: pytest.MonkeyPatch
):
    """What is not ready is not read, and nothing else is asked for meanwhile."""
    asked = []

    class Unready:
        is_ready = False

        def __init__(self, tracker: Any) -> None:
            asked.append(tracker)

        def logs(self) -> Any:
            raise AssertionError("it was read, which waits")

    monkeypatch.setattr(_progress, "Snapshot", Unready)
    example.fit(verbose=1, batch_size=2)
    assert len(asked) == 1
    assert "4/4" in screen.file.getvalue()


def test_the_bar_looks_ten_times_a_second_at_most(
    example: Any, screen: Console, monkeypatch: pytest.MonkeyPatch
):
    """Fast batches cost nothing: of 4 batches in no time one is drawn."""
    monkeypatch.setattr(_progress, "BETWEEN", 0.1)
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: 100.0)
    drawn = []
    monkeypatch.setattr(_progress.Bar, "_draw", lambda self: drawn.append(self.done))
    example.fit(verbose=1, batch_size=2)
    assert drawn == [1]


def test_an_error_leaves_the_terminal_as_it_was(example: Any, screen: Console):
    """The bar is gone and the cursor is back."""

    def fail(batch: int, logs: Any) -> None:
        if batch:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        example.fit(dj.callbacks.LambdaCallback(on_train_batch_end=fail), verbose=1, batch_size=2)
    text = screen.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_length_of_a_dataset_of_unknown_length_is_known_after_an_epoch(
    screen: Console,
):
    """Then the bar has an end."""
    bar = _progress.Bar("fit", screen)
    bar.set_params({"epochs": 2, "steps": None, "examples": 4})
    totals = []
    bar._draw = lambda: totals.append(bar._steps)
    for epoch in range(2):
        bar.on_epoch_begin(epoch)
        for batch in range(3):
            bar._count(batch, None)
        bar.on_epoch_end(epoch, {})
    assert totals == [None] * 3 + [3] * 3


def test_examples_per_second_are_of_real_examples_and_without_validation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Seven examples in two seconds, then a validation of a minute."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])
    shown = _progress.Lines("fit")
    shown.set_params({"epochs": 1, "steps": 2, "examples": 7})
    shown.on_epoch_begin(0)
    shown._count(1, None)
    now[0] = 2.0
    shown.on_test_begin()
    now[0] = 62.0
    shown.on_test_end({"loss": 1.0})
    shown.on_epoch_end(0, {"loss": 0.0, "tiny": 1e-5, "many": np.zeros(3)})
    assert capsys.readouterr().out == (
        "Epoch 1/1 - 2 batches - 2.0 s - 4 examples/s - loss: 0.0000 - tiny: 1.0000e-05\n"
    )


def test_a_notebook_without_widgets_gets_lines(monkeypatch: pytest.MonkeyPatch):
    """Rich can only redraw through ipywidgets there."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(_progress, "find_spec", lambda name: None)
    assert _progress._drawing_console() is None
    monkeypatch.setattr(_progress, "find_spec", lambda name: object())
    assert _progress._drawing_console() is not None


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch):
    """One bar for a job."""
    assert len(_progress.progress("auto", "fit")) == 1
    monkeypatch.setattr("distribute_jax.processes._job._current", SimpleNamespace(index=1))
    assert _progress.progress("auto", "fit") == []
