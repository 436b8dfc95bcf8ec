"""Progress: a bar in a terminal or notebook, lines elsewhere."""

from __future__ import annotations

import re
import sys
from io import BytesIO, StringIO, TextIOWrapper
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import distribute_jax as dj
from distribute_jax.training import _progress
from distribute_jax.training._trainer import Trainer
from tests.training.model_factory import compile_model

LINE = re.compile(
    r"(.+) - (\d+) batch(?:es)? - [\d.]+ s(?: - [\d.e+]+ m?s/step - [\d,]+ examples/s)?(?: - (.+))?"
)


def lines(text: str) -> list[tuple[str, str, str | None]]:
    """Returns title, batches and numbers of every line."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [match.groups() for match in found]


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_a_line_for_each_epoch_without_a_terminal(
    example: Any, capsys: pytest.CaptureFixture[str], verbose: Any
):
    example.fit(epochs=2, verbose=verbose, validation_data=(example.x, example.y), batch_size=4)
    shown = lines(capsys.readouterr().out)
    assert [line[:2] for line in shown] == [("Epoch 1/2", "2"), ("Epoch 2/2", "2")]
    assert re.fullmatch(r"loss: \d+\.\d{4} - val_loss: \S+", shown[0][2])


def test_a_terminal_without_the_characters_of_the_bar_gets_lines(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    console = Console(file=TextIOWrapper(BytesIO(), "ascii"), force_terminal=True)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    example.fit(verbose=1)
    assert [line[0] for line in lines(capsys.readouterr().out)] == ["Epoch 1/1"]


@pytest.mark.exhaustive
def test_evaluate_and_predict_print_a_line(example: Any, capsys: pytest.CaptureFixture[str]):
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
def test_unknown_verbosity_is_refused(example: Any, verbose: Any):
    with pytest.raises(
        ValueError, match=r"verbose.* must be (one of 'auto', 0, 1, 2|an integer or a str); got"
    ):
        example.fit(verbose=verbose)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal whose output can be read; every batch is drawn."""
    console = Console(file=StringIO(), force_terminal=True, width=160, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    monkeypatch.setattr(_progress, "REFRESH_SECONDS", 0.0)
    return console


def test_a_bar_shows_batches_speed_and_numbers(example: Any, screen: Console):
    example.fit(verbose=1, epochs=2, batch_size=2, x=np.tile(example.x, (8, 1)),
                y=np.tile(example.y, (8, 1)))  # fmt: skip
    text = screen.file.getvalue()
    assert re.search(r"Epoch 1/2.* 0/32 .*compiling…", text)
    assert re.search(r"Epoch 1/2.*━.* 7/32 .* m?s/step - [\d,]+ examples/s", text)
    assert re.search(r"Epoch 2/2.*32/32 .* loss: \d", text)
    assert len(re.findall(r"Epoch \d/2 - 32 batches - .* examples/s - loss: \d", text)) == 2
    assert text.count("compiling") == 1
    assert text.endswith("\n")


def test_the_bar_never_waits_for_a_step(
    example: Any, screen: Console, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    class Unready:
        is_ready = False

        def __init__(self, trainer: Any, kind: str) -> None:
            asked.append(kind)

        def logs(self) -> Any:
            raise AssertionError("it was read, which waits")

    monkeypatch.setattr(Trainer, "snapshot", lambda *args: Unready(*args))
    example.fit(verbose=1, batch_size=2)
    assert len(asked) == 1
    assert "4/4" in screen.file.getvalue()


def test_the_bar_is_drawn_ten_times_a_second_at_most(
    example: Any, screen: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_progress, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: 100.0)
    drawn = []
    monkeypatch.setattr(_progress.Bar, "draw", lambda self, title, done, *_: drawn.append(done))
    example.fit(verbose=1, batch_size=2)
    assert drawn == [0, 1]


def test_an_error_restores_the_terminal(example: Any, screen: Console):
    def fail(batch: int, logs: Any) -> None:
        if batch:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        example.fit(dj.callbacks.LambdaCallback(on_train_batch_end=fail), verbose=1, batch_size=2)
    text = screen.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_length_of_a_dataset_of_unknown_length_is_known_after_an_epoch(screen: Console):
    bar = _progress.Progress("fit", _progress.Bar(screen))
    bar.set_params({"epochs": 2, "steps": None, "examples": 4})
    totals = []
    bar._screen.draw = lambda title, done, steps, texts: totals.append(steps)
    for epoch in range(2):
        bar.on_epoch_begin(epoch)
        for batch in range(3):
            bar._count(batch, None)
        bar.on_epoch_end(epoch, {})
    assert totals == [None] * 4 + [3] * 3


def test_the_speed_is_that_of_training_without_validation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])
    shown = _progress.Progress("fit", _progress.Lines())
    shown.set_params({"epochs": 2, "steps": 3, "examples": 0})
    for epoch in range(2):
        shown.on_epoch_begin(epoch)
        for batch, seconds in enumerate((3.0, 2.0, 3.0)):
            now[0] += seconds
            shown.params["examples"] = 4 * (batch + 1)
            shown.on_train_batch_end(batch)
        now[0] += 1.0
        shown.on_test_begin()
        now[0] += 60.0
        shown.on_test_end({"loss": 1.0})
        shown.on_epoch_end(epoch, {"loss": 0.0, "tiny": 1e-5, "many": np.zeros(3)})
    text = "3 batches - 9.0 s - 3.00 s/step - 1 examples/s - loss: 0.0000 - tiny: 1.0000e-05\n"
    assert capsys.readouterr().out == f"Epoch 1/2 - {text}Epoch 2/2 - {text}"


def test_validation_is_shown(example: Any, screen: Console):
    example.fit(verbose=1, batch_size=2, validation_data=(example.x, example.y))
    assert re.search(r"Epoch 1/1 validation .* 0/4 ", screen.file.getvalue())
    assert re.search(r"Epoch 1/1 validation .* 4/4 ", screen.file.getvalue())


@pytest.mark.parametrize("width", [40, 60, 100])
def test_lines_fit_the_terminal(screen: Console, width: int):
    screen.width = width
    bar = _progress.Progress("fit", _progress.Bar(screen))
    bar.set_params({"epochs": 1, "steps": 2, "examples": 4})
    bar.on_epoch_begin(0)
    bar._screen.draw(bar.title, 1, 2, [f"a_long_metric_{i}: 0.1234" for i in range(4)])
    bar.on_epoch_end(0, {f"a_long_metric_{i}": 0.1234 for i in range(4)})
    text = re.sub(r"\x1b\[[?\d]*[A-Za-z]|\r", "\n", screen.file.getvalue())
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"━.* 1/2", text)
    assert len(re.findall(r"a_long_metric_\d: 0\.1234(?: -|\n)", text)) >= 4


def test_a_notebook_needs_no_widgets(example: Any, monkeypatch: pytest.MonkeyPatch):
    shown: list[list[str]] = []

    class Handle:
        def update(self, content: Any, raw: bool) -> None:
            shown[-1].append(content["text/plain"])

    def display(content: Any, raw: bool, display_id: bool) -> Handle:
        shown.append([content["text/plain"]])
        return Handle()

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(_progress, "REFRESH_SECONDS", 0.0)
    example.fit(verbose=1, batch_size=2, epochs=2)
    assert shown[0][0] == f"Epoch 1/2 {'╌' * 20} 0/4 compiling…"
    assert shown[1][1].startswith(f"Epoch 2/2 {'━' * 10}{'╌' * 10} 2/4 ")
    assert [len(lines([of_epoch[-1]][0])) for of_epoch in shown] == [1, 1]


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch):
    assert len(_progress.progress("auto", "fit")) == 1
    monkeypatch.setattr("distribute_jax.processes._job._current", SimpleNamespace(index=1))
    assert _progress.progress("auto", "fit") == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"verify": "first"}, {"steps_per_execution": 2}], ids=str)
def test_the_speed_excludes_compilation_of_later_batches(
    s2: dj.Strategy,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
):
    """A step takes one second, and each trace 1000."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])

    class Slow(nnx.Linear):
        def __call__(self, x: Any) -> Any:
            now[0] += 1000.0
            return super().__call__(x)

    def second(*_: Any) -> None:
        now[0] += 1.0

    model = compile_model(s2, lambda: Slow(2, 1, rngs=nnx.Rngs(0)), **options)
    x = np.ones((14, 2), np.float32)
    callback = dj.callbacks.LambdaCallback(on_train_batch_end=second)
    model.fit(x, x[:, :1], 4, callbacks=[callback], verbose=2)
    (batches,) = re.findall(
        r"Epoch 1/1 - 4 batches - \d+\.0 s - ([\d.]+ m?s/step)", capsys.readouterr().out
    )
    assert batches == ("500 ms/step" if "steps_per_execution" in options else "1.00 s/step")
