"""Callbacks that log: ``CSVLogger``, ``LogEvery``, ``TensorBoard``, ``WandbLogger`` and ``MLflowLogger``."""

from __future__ import annotations

import csv
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from distribute_jax import summary
from distribute_jax._checks import check_choice, check_int, importing, is_real, refuse
from distribute_jax._errors import ArgumentError, warn_user
from distribute_jax._mesh import on_host
from distribute_jax.processes import is_chief
from distribute_jax.training._progress import format_scalars
from distribute_jax.training._tracker import Snapshot
from distribute_jax.training._weights import weight_variables
from distribute_jax.training.callbacks._callback import Callback
from distribute_jax.training.callbacks._checkpoints import SaveSchedule


class _Logger(Callback):
    """A callback that writes a log; if writing fails it warns and stops, and the training continues."""

    _has_failed = False
    _write_errors: type[Exception] = OSError

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._has_failed = False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except self._write_errors as error:
            self._has_failed = True
            warn_user(
                f"{type(self).__name__} can no longer write ({error}); the training continues without it.",
                RuntimeWarning,
            )


class CSVLogger(_Logger):
    """Writes a line of a CSV file for every epoch, on the chief only.

    The columns are ``epoch`` and the names of the first epoch's logs in alphabetical order; an epoch that
    lacks one of them has ``NA``. If the first epoch has no validation, columns for one are added.

    Args:
        filename: the file.
        separator: what separates two values.
        append: whether to continue an existing file, with its columns, as after an interruption.

    Source: https://keras.io/api/callbacks/csv_logger/
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        super().__init__()
        if len(separator) != 1:
            refuse("CSVLogger: separator", "one character", separator)
        self.filename, self.sep, self.append = os.fspath(filename), separator, append
        self._file: TextIO | None = None
        self._keys: list[str] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if not is_chief():
            return
        path = Path(self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._keys, is_cut = None, False
        if self.append and path.exists() and (content := path.read_bytes()):
            with path.open(newline="", encoding="utf-8") as file:
                self._keys = next(csv.reader(file, delimiter=self.sep))[1:]
            is_cut = not content.endswith(b"\n")  # by a full disk
        self._file = path.open("a" if self.append else "w", newline="", encoding="utf-8")
        self._file.write("\r\n" * is_cut)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._file is not None and not self._has_failed:
            with self._writing():
                self._write_epoch(self._file, epoch, logs or {})

    def _write_epoch(self, file: TextIO, epoch: int, logs: dict[str, Any]) -> None:
        writer = csv.writer(file, delimiter=self.sep)
        if self._keys is None:
            self._keys = sorted(logs)
            if not any(key.startswith("val_") for key in self._keys):
                self._keys += [f"val_{key}" for key in self._keys]
            writer.writerow(["epoch", *self._keys])
        writer.writerow([epoch, *(_text(logs.get(key, "NA")) for key in self._keys)])
        file.flush()

    def _release(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # on_epoch_end has warned of it
                self._file.close()
            self._file = None


def _text(value: Any) -> Any:
    return f"[{', '.join(map(str, np.ravel(value)))}]" if np.ndim(value) else value


_MAX_PENDING = 32
"""How many snapshots of loss and metrics may wait to be read."""


class _BatchLogger(_Logger):
    """A logger that also writes numbers of batches, once the devices have computed them."""

    reads_late = True

    def __init__(self, update_freq: str | int) -> None:
        super().__init__()
        if isinstance(update_freq, str):
            check_choice(
                "update_freq, if not a number of batches,", update_freq, ("epoch", "batch")
            )
        self._schedule = SaveSchedule(1 if update_freq == "batch" else update_freq)
        self._pending: deque[tuple[int, Snapshot]] = deque()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._schedule.start()
        self._step_before: int | None = None
        self._pending.clear()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Not in on_train_begin, where other callbacks restore the training.
        if self._step_before is None:
            steps = int(np.asarray(self.model.optimizer.step[...]))
            self._step_before = steps - self.params["batches"]

    @property
    def _step(self) -> int:
        return (self._step_before or 0) + int(self.params["batches"])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if is_due := self._schedule.is_due(self.params["batches"]):
            self._pending.append((self._step, self.model.trainer.snapshot()))
        self._write_batches(max_pending=_MAX_PENDING)
        if is_due:
            self._on_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._write_batches(max_pending=0)
        self._write_epoch(epoch, {**self._learning_rate(), **(logs or {})})

    def _release(self) -> None:
        self._pending.clear()

    def _write_batches(self, max_pending: int) -> None:
        while self._pending and (len(self._pending) > max_pending or self._pending[0][1].is_ready):
            step, snapshot = self._pending.popleft()
            named = {f"batch_{name}": value for name, value in snapshot.logs().items()}
            self._write("train", named, step)

    def _write(self, run: str, numbers: dict[str, Any], step: int) -> None:
        scalars = {name: float(value) for name, value in numbers.items() if is_real(value)}
        if scalars and not self._has_failed:
            with self._writing():
                self._write_scalars(run, scalars, step)

    def _learning_rate(self) -> dict[str, float]:
        try:
            return {"learning_rate": self.model.learning_rate}
        except ArgumentError:  # the rate is not part of the state
            return {}

    def _on_due(self) -> None:
        """Called after a batch whose numbers are written."""

    def _write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Writes the numbers of an epoch; not abstract, since ``fit`` prints them itself."""

    @abstractmethod
    def _write_scalars(self, run: str, scalars: dict[str, float], step: int) -> None:
        """Writes numbers of training or validation at a step."""


class LogEvery(_BatchLogger):
    """Prints the running loss and metrics of ``fit`` after every so many batches, on the chief only.

    A line is printed once the devices have computed its numbers: the loop does not wait.

    Args:
        batches: after how many batches.

    Example:
        >>> import distribute_jax as dj
        >>> callback = dj.callbacks.LogEvery(100)
    """

    def __init__(self, batches: int = 100) -> None:
        check_int("LogEvery: batches", batches)
        super().__init__(batches)

    def _write_scalars(self, run: str, scalars: dict[str, float], step: int) -> None:
        if is_chief():
            named = {name.removeprefix("batch_"): value for name, value in scalars.items()}
            print(" - ".join([f"Step {step}", *format_scalars(named)]), flush=True)


class TensorBoard(_BatchLogger):
    """Writes event files for TensorBoard, on the chief only.

    Training goes to ``log_dir/train``, validation to ``log_dir/validation``, with Keras's tags:
    ``epoch_loss`` at the epoch, ``batch_loss`` at the training step, ``evaluation_loss_vs_iterations``.
    Numbers of batches are written once the devices have computed them: the loop does not wait. Profiles
    are recorded by ``ProfilerCallback``.

    Args:
        log_dir: the folder.
        histogram_freq: write histograms of all weights every so many epochs; 0 for never.
        write_steps_per_second: whether to write the training speed.
        update_freq: ``"epoch"``, ``"batch"``, or after how many batches numbers are written.

    Raises:
        ValueError: an unknown ``update_freq``.

    Source: https://keras.io/api/callbacks/tensorboard/
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        *,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
    ) -> None:
        super().__init__(update_freq)
        self.log_dir, self.histogram_freq = Path(log_dir), histogram_freq
        self.write_steps_per_second = write_steps_per_second
        self._writers: dict[str, summary.SummaryWriter] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._since, self._first = time.perf_counter(), self._step

    def _on_due(self) -> None:
        if self.write_steps_per_second:
            self._write("train", {"batch_steps_per_second": self._speed()}, self._step)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        step = int(np.asarray(self.model.optimizer.step[...]))
        named = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
        self._write("validation", named, step)

    def _write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        train = {f"epoch_{k}": v for k, v in logs.items() if not k.startswith("val_")}
        if self.write_steps_per_second:
            train["epoch_steps_per_second"] = self._speed()
        self._write("train", train, epoch)
        validation = {f"epoch_{k[4:]}": v for k, v in logs.items() if k.startswith("val_")}
        self._write("validation", validation, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_weights(epoch)
        if not self._has_failed:
            with self._writing():
                for writer in self._writers.values():
                    writer.flush()

    def _release(self) -> None:
        super()._release()
        for writer in self._writers.values():
            with suppress(OSError):
                writer.close()
        self._writers.clear()

    def _write_scalars(self, run: str, scalars: dict[str, float], step: int) -> None:
        with self._writer(run).as_default(step):
            for name, value in scalars.items():
                summary.scalar(name, value)

    def _write_weights(self, epoch: int) -> None:
        for name, variable in weight_variables(self.model.module):
            array = on_host(variable[...])  # a collective: also where writing has failed
            if not self._has_failed:
                with self._writing(), self._writer("train").as_default(epoch):
                    tag = f"{name.replace('.', '/')}/histogram"
                    summary.histogram(tag, array[np.isfinite(array)])

    def _writer(self, run: str) -> summary.SummaryWriter:
        if run not in self._writers:
            self._writers[run] = summary.create_file_writer(self.log_dir / run)
        return self._writers[run]

    def _speed(self) -> float:
        return (self._step - self._first) / max(time.perf_counter() - self._since, 1e-9)


class _RunLogger(_BatchLogger):
    """Logs to the active run of a service, or to a new one, on the chief only."""

    _write_errors = Exception  # of the network, or of the service's own kinds
    _package = ""

    def __init__(self, update_freq: str | int = "epoch", **settings: Any) -> None:
        super().__init__(update_freq)
        self._settings, self._owns_run = settings, False
        self._run: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if not is_chief():
            return
        needs = f"dj.callbacks.{type(self).__name__} needs {self._package}"
        with importing(needs, self._package):
            service = import_module(self._package)
        self._run, self._owns_run = self._begin(service)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._end(code=0)

    def _release(self) -> None:
        super()._release()
        self._end(code=1)

    def _end(self, code: int) -> None:
        if self._owns_run:
            with suppress(Exception):  # _writing has warned of it
                self._finish(code)
        self._run, self._owns_run = None, False

    def _write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        self._write("", {"epoch": epoch, **logs}, self._step)

    def _write_scalars(self, run: str, scalars: dict[str, float], step: int) -> None:
        if self._run is not None:
            self._log(scalars, step)

    @abstractmethod
    def _begin(self, service: Any) -> tuple[Any, bool]:
        """Returns the program's active run, or a new one, and True if it is new."""

    @abstractmethod
    def _log(self, scalars: dict[str, float], step: int) -> None:
        """Logs numbers."""

    @abstractmethod
    def _finish(self, code: int) -> None:
        """Ends the run; a ``code`` other than 0 means that it failed."""


class WandbLogger(_RunLogger):
    """Logs to Weights & Biases, on the chief only: to ``wandb.run``, or to a run that ends with ``fit``.

    An epoch logs ``loss``, ``val_loss`` and so on, ``epoch`` and ``learning_rate``, a batch
    ``batch_loss``, each at the training step. The loop does not wait for the numbers. If the service
    becomes unreachable, logging ends with a warning, and the training continues.

    Args:
        update_freq: ``"epoch"``, ``"batch"``, or after how many batches numbers are logged too.
        **settings: arguments of ``wandb.init``, such as ``project`` and ``config``.

    Raises:
        MissingPackageError: in ``fit``: wandb is not installed.

    Example:
        >>> import distribute_jax as dj
        >>> logger = dj.callbacks.WandbLogger(update_freq=50, project="digits", config={"width": 64})
        >>> # model.fit(x, y, callbacks=[logger])
    """

    _package = "wandb"

    def _begin(self, service: Any) -> tuple[Any, bool]:
        is_new = service.run is None
        return service.init(**self._settings) if is_new else service.run, is_new

    def _log(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(scalars, step=step)

    def _finish(self, code: int) -> None:
        self._run.finish(exit_code=code)


class MLflowLogger(_RunLogger):
    """Logs to MLflow, on the chief only: to the active run, or to one that ends with ``fit``.

    The names are those of ``WandbLogger``. ``mlflow.set_tracking_uri`` or the environment says where.

    Args:
        update_freq: ``"epoch"``, ``"batch"``, or after how many batches numbers are logged too.
        **settings: arguments of ``mlflow.start_run``, such as ``run_name`` and ``experiment_id``.

    Raises:
        MissingPackageError: in ``fit``: mlflow is not installed.

    Example:
        >>> import distribute_jax as dj
        >>> logger = dj.callbacks.MLflowLogger(update_freq=50, run_name="digits")
        >>> # model.fit(x, y, callbacks=[logger])
    """

    _package = "mlflow"

    def _begin(self, service: Any) -> tuple[Any, bool]:
        is_new = service.active_run() is None
        if is_new:
            service.start_run(**self._settings)
        return service, is_new

    def _log(self, scalars: dict[str, float], step: int) -> None:
        self._run.log_metrics(scalars, step=step)

    def _finish(self, code: int) -> None:
        self._run.end_run("FAILED" if code else "FINISHED")
