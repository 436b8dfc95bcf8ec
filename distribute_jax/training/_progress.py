"""The progress of ``fit``, ``evaluate`` and ``predict``: a live bar, or plain lines."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import numpy as np

from distribute_jax._messages import check_choice
from distribute_jax.processes import is_chief
from distribute_jax.training._tracker import Snapshot
from distribute_jax.training.callbacks._callback import Callback

BETWEEN = 0.1
"""Seconds between two updates of the bar."""


def progress(verbose: int | str, called: str) -> list[Callback]:
    """Returns what shows the progress of ``fit``, ``evaluate`` or ``predict``, on the chief.

    ``verbose`` is 0 for nothing, 1 or ``"auto"`` for a bar, 2 for lines; without a terminal or widgets
    a bar is lines too.
    """
    check_choice(f"{called}(verbose)", verbose, ("auto", 0, 1, 2))
    if verbose == 0 or not is_chief():
        return []
    console = None if verbose == 2 else _drawing_console()
    return [Lines(called) if console is None else Bar(called, console)]


class Lines(Callback):
    """Prints a line after each epoch, evaluation or prediction."""

    reads_late = True

    def __init__(self, called: str) -> None:
        super().__init__()
        self.title = called
        self._in_fit = called == "fit"
        self._steps: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._since = time.perf_counter()
        self._seconds: float | None = None
        self.done = self.examples = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.title = f"Epoch {epoch + 1}/{self.params['epochs']}"
        self._steps = self.params["steps"] or self._steps
        self._begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._count(batch, "train")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = self.done
        self._end(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._in_fit:
            self._stop_clock()
        else:
            self.on_predict_begin()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._in_fit:
            self._count(batch, "test")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._in_fit:
            self._end(logs)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps = self.params["steps"]
        self._begin()

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._count(batch, None)

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._end(None)

    def rate(self) -> str:
        seconds = self._seconds or time.perf_counter() - self._since
        return f"{self.examples / max(seconds, 1e-9):,.0f} examples/s"

    def _count(self, batch: int, kind: str | None) -> None:
        del kind
        self.done, self.examples = batch + 1, self.params["examples"]

    def _stop_clock(self) -> None:
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._since

    def _end(self, logs: dict[str, Any] | None) -> None:
        self._stop_clock()
        batches = f"{self.done} batch{'' if self.done == 1 else 'es'}"
        seconds = f"{self._seconds:.1f} s"
        self._print(" - ".join([self.title, batches, seconds, self.rate(), *_numbers(logs)]))

    def _print(self, line: str) -> None:
        print(line, flush=True)


class Bar(Lines):
    """Draws a bar while batches are processed, and leaves the line of each epoch above it.

    It never waits for a step: it shows the newest numbers that the devices have computed.
    """

    def __init__(self, called: str, console: Any) -> None:
        super().__init__(called)
        self._console = console
        self._bar: Any = None

    def _begin(self) -> None:
        super()._begin()
        self._snapshot: Snapshot | None = None
        self._shown: list[str] = []
        self._updated = 0.0

    def _count(self, batch: int, kind: str | None) -> None:
        super()._count(batch, kind)
        now = time.perf_counter()
        if now - self._updated < BETWEEN:
            return
        self._updated = now
        if self._snapshot is not None and self._snapshot.is_ready:
            self._shown, self._snapshot = _numbers(self._snapshot.logs()), None
        if self._snapshot is None and kind is not None:
            self._snapshot = Snapshot(self.model.trainer.tracked(kind))
        self._draw()

    def _draw(self) -> None:
        if self._bar is None:
            self._bar, self._task = _new_bar(self._console, self.title, self._steps)
        self._bar.update(
            self._task, description=self.title, completed=self.done, total=self._steps,
            rate=self.rate(), numbers=" - ".join(self._shown), refresh=True,
        )  # fmt: skip

    def _end(self, logs: dict[str, Any] | None) -> None:
        self._release()
        super()._end(logs)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _release(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _numbers(logs: dict[str, Any] | None) -> list[str]:
    scalars = {name: float(v) for name, v in (logs or {}).items() if not np.ndim(v)}
    return [f"{name}: {_short(value)}" for name, value in scalars.items()]


def _short(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.4e}"


def _drawing_console() -> Any:
    """Returns a console if it can redraw a line: in a terminal, or a notebook with widgets."""
    from rich.console import Console

    console = Console()
    draws = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_interactive
    return console if draws else None


def _new_bar(console: Any, title: str, steps: int | None) -> tuple[Any, Any]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        auto_refresh=False,  # no thread: the loop draws when it has something new
        transient=True,
    )
    task = bar.add_task(title, total=steps, rate="", numbers="")
    bar.start()
    return bar, task
