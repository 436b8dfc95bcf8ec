"""Shows the progress of ``fit``, ``evaluate`` and ``predict``: a live bar, or plain lines."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from distribute_jax._checks import check_choice, is_real
from distribute_jax.processes import is_chief
from distribute_jax.training._tracker import Snapshot
from distribute_jax.training.callbacks._callback import Callback

REFRESH_SECONDS = 0.1
"""Seconds between two updates of the bar."""


def progress(verbose: int | str, method: str) -> list[Callback]:
    """Returns the callbacks that show progress, on the chief only.

    ``verbose`` is 0 for nothing, 1 or ``"auto"`` for a bar, 2 for lines; lines replace the bar without a
    terminal that has its characters, or a notebook.
    """
    check_choice(f"{method}(verbose)", verbose, ("auto", 0, 1, 2))
    if verbose == 0 or not is_chief():
        return []
    from rich.console import Console

    console = Console()
    has_bar = console.is_jupyter or (console.is_interactive and not console.options.ascii_only)
    if verbose == 2 or not has_bar:
        return [Progress(method, Lines())]
    return [Progress(method, NotebookBar() if console.is_jupyter else Bar(console))]


class _Counts(NamedTuple):
    seconds: float
    done: int
    examples: int
    prepared: float
    """Seconds spent on compiling."""


class Progress(Callback):
    """Draws on a screen while batches are processed, and leaves one line per epoch on it.

    It never waits for a step: it shows the newest numbers that the devices have computed.
    """

    reads_late = True

    def __init__(self, method: str, screen: Lines | Bar | NotebookBar) -> None:
        super().__init__()
        self.title, self._screen = method, screen
        self._in_fit = method == "fit"
        self._compiles = True
        """True until the first batch has run."""
        self._steps: int | None = None

    def _begin(self) -> None:
        self._start = self._now = self._counts(0, 0)
        self._clock_runs = True
        self._snapshot: Snapshot | None = None
        self._metrics: list[str] = []
        self._drawn = 0.0
        if self._compiles:
            self._screen.draw(self.title, 0, self._steps, ["compiling…"])

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.title = f"Epoch {epoch + 1}/{self.params['epochs']}"
        self._steps = self.params["steps"] or self._steps
        self._begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._count(batch, "train")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = self._now.done
        self._end(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._in_fit:
            self._stop_clock()  # validation is not training
            self._draw_validation(0)
        else:
            self.on_predict_begin()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._in_fit:
            self._count(batch, "test")
        elif self._is_due():
            self._draw_validation(batch + 1)

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

    def _count(self, batch: int, kind: str | None) -> None:
        self._now = self._counts(batch + 1, self.params["examples"])
        self._compiles = False
        if not self._is_due():
            return
        if self._snapshot is not None and self._snapshot.is_ready:
            self._metrics, self._snapshot = format_scalars(self._snapshot.logs()), None
        if self._snapshot is None and kind is not None:
            self._snapshot = self.model.trainer.snapshot(kind)
        texts = [*self._speed(), *self._metrics]
        self._screen.draw(self.title, self._now.done, self._steps, texts)

    def _draw_validation(self, done: int) -> None:
        self._screen.draw(f"{self.title} validation", done, self.params.get("validation_steps"), [])

    def _is_due(self) -> bool:
        now = time.perf_counter()
        if not self._screen.is_live or now - self._drawn < REFRESH_SECONDS:
            return False
        self._drawn = now
        return True

    def _speed(self) -> list[str]:
        """Returns time per step and examples per second, without compilation; nothing if unknown."""
        start, now = self._start, self._now
        seconds = now.seconds - start.seconds - (now.prepared - start.prepared)
        if seconds <= 0 or not now.done:
            return []
        return [
            f"{_format_seconds(seconds / now.done)}/step",
            f"{now.examples / seconds:,.0f} examples/s",
        ]

    def _counts(self, done: int, examples: int) -> _Counts:
        prepared = 0.0 if self.model is None else self.model._predicting_trainer().clock.seconds
        return _Counts(time.perf_counter(), done, examples, prepared)

    def _stop_clock(self) -> None:
        if self._clock_runs:
            self._now = self._now._replace(seconds=time.perf_counter())
            self._clock_runs = False

    def _end(self, logs: dict[str, Any] | None) -> None:
        self._stop_clock()
        done = self._now.done
        batches = f"{done} batch{'' if done == 1 else 'es'}"
        seconds = f"{self._now.seconds - self._start.seconds:.1f} s"
        self._screen.finish([self.title, batches, seconds, *self._speed(), *format_scalars(logs)])

    def _release(self) -> None:
        self._screen.close()


class Lines:
    """Prints the last line only."""

    is_live = False

    def draw(self, title: str, done: int, steps: int | None, texts: list[str]) -> None:
        """Draws how far it is."""

    def finish(self, parts: list[str]) -> None:
        """Prints a line in place of what was drawn."""
        print(" - ".join(parts), flush=True)

    def close(self) -> None:
        """Removes what was drawn."""


class Bar:
    """Draws a bar in a terminal, below the lines."""

    is_live = True

    def __init__(self, console: Any) -> None:
        self._console = console
        self._bar: Any = None

    def draw(self, title: str, done: int, steps: int | None, texts: list[str]) -> None:
        task = {
            "description": title,
            "completed": done,
            "total": steps,
            "texts": " - ".join(texts),
        }
        if self._bar is None:
            self._bar = _new_bar(self._console)
            self._task = self._bar.add_task(**task)
            self._bar.start()
        else:
            self._bar.update(self._task, **task, refresh=True)

    def finish(self, parts: list[str]) -> None:
        self.close()
        lines = parts[:1]
        for part in parts[1:]:
            longer = f"{lines[-1]} - {part}"
            if len(longer) <= self._console.width:
                lines[-1] = longer
            else:
                lines.append(f"  {part}")
        self._console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class NotebookBar:
    """Draws the bar as text in the output of a notebook cell, without widgets."""

    is_live = True
    _shown: Any = None

    def draw(self, title: str, done: int, steps: int | None, texts: list[str]) -> None:
        filled = 20 * done // steps if steps else 0
        bar = f"{'━' * filled}{'╌' * (20 - filled)} {done}/{steps or '?'}"
        self._show(" ".join(filter(None, [title, bar, " - ".join(texts)])))

    def _show(self, text: str) -> None:
        from IPython.display import display

        content = {"text/plain": text}
        if self._shown is None:
            self._shown = display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)

    def finish(self, parts: list[str]) -> None:
        self._show(" - ".join(parts))
        self._shown = None

    def close(self) -> None:
        """Leaves the text."""


def format_scalars(logs: dict[str, Any] | None) -> list[str]:
    scalars = ((name, float(v)) for name, v in (logs or {}).items() if is_real(v))
    return [f"{n}: {v:.4e}" if 0 < abs(v) < 1e-3 else f"{n}: {v:.4f}" for n, v in scalars]


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


_NARROW_WIDTH = 80


def _new_bar(console: Any) -> Any:
    from rich import progress as bars
    from rich.table import Column
    from rich.text import Text

    class Texts(bars.ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(task.fields["texts"], no_wrap=True, overflow="ellipsis")

    is_wide = console.width >= _NARROW_WIDTH
    columns: list[bars.ProgressColumn] = [
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(20 if is_wide else 8, table_column=Column(no_wrap=True)),
        bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        Texts(),  # the only column that shrinks
    ]
    if is_wide:
        column = bars.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
        columns.insert(3, column)
    # No refresh thread: the loop draws when it has something new.
    return bars.Progress(*columns, console=console, auto_refresh=False, transient=True)
