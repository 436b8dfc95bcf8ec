"""Writes the numbers of every epoch into a file."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from distribute_jax.processes import is_chief
from distribute_jax.training.callbacks._callback import Callback


class CSVLogger(Callback):
    """Writes a line of a CSV file for every epoch, by the first process only.

    The columns are ``epoch`` and the names of the first epoch's logs in alphabetical order; an epoch
    without one of them has ``NA``. Columns for a validation that comes later are there from the start.

    Args:
        filename: the file.
        separator: what stands between two values.
        append: whether a file that exists is continued, as after an interruption.

    Source: https://keras.io/api/callbacks/csv_logger/
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        super().__init__()
        self.filename, self.sep, self.append = os.fspath(filename), separator, append
        self._file: TextIO | None = None
        self._keys: list[str] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the file."""
        self._release()
        if not is_chief():
            return
        path = Path(self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._headed = self.append and path.exists() and path.stat().st_size > 0
        self._keys = None
        self._file = path.open("a" if self.append else "w", newline="", encoding="utf-8")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a line."""
        if self._file is None:
            return
        logs = logs or {}
        writer = csv.writer(self._file, delimiter=self.sep)
        if self._keys is None:
            self._keys = sorted(logs)
            if not any(key.startswith("val_") for key in self._keys):
                self._keys += [f"val_{key}" for key in self._keys]
            if not self._headed:
                writer.writerow(["epoch", *self._keys])
        writer.writerow([epoch, *(_text(logs.get(key, "NA")) for key in self._keys)])
        self._file.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the file."""
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _text(value: Any) -> Any:
    return f"[{', '.join(map(str, np.ravel(value)))}]" if np.ndim(value) else value
