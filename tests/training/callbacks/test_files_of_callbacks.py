"""Callbacks that write: files, event files and services get the numbers of the training."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.training.callbacks import _loggers

sys.path.append(str(Path(__file__).parents[2] / "summary"))
from event_reader import read, scalars


def test_a_csv_file_has_sorted_columns_and_a_line_per_epoch(example: Any, tmp_path: Path):
    file = tmp_path / "log.csv"
    example.fit(dj.callbacks.CSVLogger(file), epochs=2)
    lines = file.read_text().splitlines()
    assert lines[0] == "epoch,loss,val_loss"
    rows = [line.split(",") for line in lines[1:]]
    assert [row[0] for row in rows] == ["0", "1"]
    assert [float(row[1]) for row in rows] == pytest.approx([25.5, 6.12255])
    assert [row[2] for row in rows] == ["NA", "NA"]


def test_a_csv_file_is_continued_or_overwritten(example: Any, tmp_path: Path):
    """Continuing writes no second header, and starts a new line if the last one was cut."""
    file = tmp_path / "log.csv"
    example.fit(dj.callbacks.CSVLogger(str(file), separator=";"))
    example.fit(dj.callbacks.CSVLogger(file, ";", append=True), initial_epoch=1, epochs=2)
    assert [line.split(";")[0] for line in file.read_text().splitlines()] == ["epoch", "0", "1"]
    file.write_text("epoch;loss\n0;25.5\n1;6.1")
    example.fit(dj.callbacks.CSVLogger(file, ";", append=True), initial_epoch=2, epochs=3)
    *before, after = file.read_text().splitlines()
    assert (before[-1], after[:2]) == ("1;6.1", "2;")
    example.fit(dj.callbacks.CSVLogger(file))
    assert [line.split(",")[0] for line in file.read_text().splitlines()] == ["epoch", "0"]


def test_a_csv_file_is_continued_with_its_columns(example: Any, tmp_path: Path):
    """Also if the first epoch has a validation, and that of the file had none."""
    file = tmp_path / "log.csv"
    callbacks = [dj.callbacks.LearningRateScheduler(lambda epoch: 0.01)]
    callbacks.append(dj.callbacks.CSVLogger(file, append=True))
    example.fit(*callbacks)
    validation = {"validation_data": (example.x, example.y), "initial_epoch": 1, "epochs": 2}
    example.fit(*callbacks, **validation)
    header, *_, row = (line.split(",") for line in file.read_text().splitlines())
    assert header == [
        "epoch",
        *(f"{v}{n}" for v in ("", "val_") for n in ("learning_rate", "loss")),
    ]
    assert [row[0], *map(float, row[1:3]), row[3], float(row[4])] == [
        "1", pytest.approx(0.01), pytest.approx(6.12255), "NA", pytest.approx(25.5 * 0.49**4)
    ]  # fmt: skip


def test_texts_among_the_logs_are_not_numbers(example: Any, tmp_path: Path, feed: Any):
    callbacks = [feed(note=["x"], nothing=[None]), dj.callbacks.TensorBoard(tmp_path)]
    history = example.fit(*callbacks, verbose=2)
    assert history.history["note"] == ["x"]
    assert repr(history) == "<History of 1 epochs; last loss: 25.5>"
    assert set(scalars(tmp_path / "train")) == {"epoch_loss", "epoch_learning_rate"}


def test_a_full_disk_ends_the_log_and_not_the_training(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dj.summary, "scalar", refuse)
    for logger in (dj.callbacks.CSVLogger("/dev/full"), dj.callbacks.TensorBoard(tmp_path)):
        with pytest.warns(RuntimeWarning, match="can no longer write.*No space left") as warned:
            history = example.fit(logger, epochs=3)
        assert len(warned) == 1
        assert warned[0].filename == str(Path(__file__).with_name("conftest.py"))
        assert len(history.epoch) == 3


def test_only_the_chief_writes(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logger = dj.callbacks.CSVLogger(tmp_path / "log.csv")
    board = dj.callbacks.TensorBoard(tmp_path / "logs")
    wandb = dj.callbacks.WandbLogger()  # which is not installed, nor imported
    for callback in (logger, board, wandb):
        callback.set_model(example.model)
        callback.set_params({"batches": 0})
    monkeypatch.setattr("distribute_jax.processes._job._current", SimpleNamespace(index=1))
    for callback in (logger, board, wandb):
        callback.on_train_begin({})
        callback.on_epoch_begin(0, {})
        callback.on_epoch_end(0, {"loss": 1.0})
        callback._release()
    assert list(tmp_path.iterdir()) == []


class Service:
    """A fake wandb or mlflow, and a run of it, which records the calls."""

    def __init__(self, *, is_down: bool = False) -> None:
        self.run: Any = None
        self.calls: list[Any] = []
        self.is_down = is_down

    def init(self, **settings: Any) -> Service:
        self.calls.append(settings)
        self.run = self
        return self

    def active_run(self) -> Any:
        return self.run

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.is_down:
            raise RuntimeError("the service is down")
        self.calls.append((step, numbers))

    def finish(self, exit_code: Any) -> None:
        self.run = None
        self.calls.append(exit_code)

    start_run, log_metrics, end_run = init, log, finish


@pytest.mark.parametrize(("name", "ends"), [("wandb", (0, 1)), ("mlflow", ("FINISHED", "FAILED"))])
def test_services_get_epochs_and_every_second_batch(
    example: Any, monkeypatch: pytest.MonkeyPatch, name: str, ends: tuple[Any, Any]
):
    """A run that fit began is ended, as failed if fit fails; the program's own run is used and kept."""
    kind = {"wandb": dj.callbacks.WandbLogger, "mlflow": dj.callbacks.MLflowLogger}[name]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(dj.MissingPackageError, match=rf"pip install 'distribute-jax\[{name}\]'"):
        example.fit(kind())
    monkeypatch.setitem(sys.modules, name, service := Service())
    first = int(example.model.optimizer.step[...])
    history = example.fit(kind(2, group="a"), batch_size=2, epochs=2).history
    settings, *logged, code = service.calls
    assert (settings, code) == ({"group": "a"}, ends[0])
    assert [step - first for step, _ in logged] == [2, 4, 4, 6, 8, 8]
    epochs = [numbers for _, numbers in logged if "epoch" in numbers]
    assert [numbers["loss"] for numbers in epochs] == history["loss"]
    assert set(logged[0][1]) == {"batch_loss"}

    def fail(*_: Any) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        example.fit(kind(), dj.callbacks.LambdaCallback(on_epoch_end=fail))
    assert service.calls[-1] == ends[1]
    service.run = service
    service.calls.clear()
    example.fit(kind())
    assert len(service.calls) == 1
    service.is_down = True
    with pytest.warns(RuntimeWarning, match="continues without it"):
        example.fit(kind())


class SaveRecorder:
    """Records what a model is asked to save, instead of saving it."""

    def __init__(self, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, float]] = []
        for name in ("save", "save_weights"):
            monkeypatch.setattr(
                type(example.model), name,
                lambda _, path, name=name: self.calls.append((name, Path(path).name, example.w)),
                raising=False,
            )  # fmt: skip

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.calls]


def test_checkpoint_names_contain_epochs_and_logs(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = SaveRecorder(example, monkeypatch)
    example.fit(dj.callbacks.ModelCheckpoint(tmp_path / "a" / "{epoch:02d}-{loss:.2f}"), epochs=2)
    assert saved.calls == [
        ("save", "01-25.50", pytest.approx(0.49)),
        ("save", "02-6.12", pytest.approx(0.2401)),
    ]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_checkpoint(example: Any, tmp_path: Path):
    """It is raised on all processes of a job, where the chief alone would raise one of the system."""
    (tmp_path / "a").touch()
    with pytest.raises(dj.CheckpointFileError, match=r"(?s)a/1 could not be .*Remove the cause"):
        example.fit(dj.callbacks.ModelCheckpoint(tmp_path / "a" / "{epoch}"))


def test_only_better_models_are_saved(
    example: Any, feed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = SaveRecorder(example, monkeypatch)
    checkpoint = dj.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}", "val_accuracy", save_best_only=True, save_weights_only=True,
        initial_value_threshold=0.2,
    )  # fmt: skip
    example.fit(feed(val_accuracy=[0.1, 0.5, 0.4, 0.5, 0.6]), checkpoint, epochs=5)
    assert saved.names == ["2", "5"]
    assert {call for call, *_ in saved.calls} == {"save_weights"}


def test_save_freq_counts_batches_through_epochs(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = SaveRecorder(example, monkeypatch)
    path = tmp_path / "{epoch}-{batch}-{loss:.1f}"
    checkpoint = dj.callbacks.ModelCheckpoint(path, save_freq=np.int64(3))
    example.fit(checkpoint, batch_size=2, epochs=2)
    assert [name.rpartition("-")[0] for name in saved.names] == ["1-3", "2-2"]


def test_without_the_monitored_number_everything_is_saved(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = SaveRecorder(example, monkeypatch)
    with pytest.warns(UserWarning, match=r"'val_loss'.*saves every time"):
        example.fit(dj.callbacks.ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True))
    assert saved.names == ["1"]


def test_unknown_names_and_frequencies_are_refused(example: Any, feed: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=r"filled in: 'val_loss'. Between braces.*: epoch, loss"):
        example.fit(dj.callbacks.ModelCheckpoint(tmp_path / "{val_loss}"))
    with pytest.raises(ValueError, match=r"filled in: unsupported format string"):
        example.fit(feed(pair=[np.zeros(2)]), dj.callbacks.ModelCheckpoint(tmp_path / "{pair:.2f}"))
    with pytest.raises(ValueError, match=r"save_freq.* got 'step'"):
        dj.callbacks.ModelCheckpoint(tmp_path, save_freq="step")


@pytest.mark.exhaustive
def test_a_profile_of_the_chosen_batches_is_written(example: Any, tmp_path: Path):
    traced = []
    note = dj.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: traced.append(profiler._is_recording)
    )
    profiler = dj.callbacks.ProfilerCallback(tmp_path, batches=(3, 5))
    example.fit(note, profiler, batch_size=2, epochs=2)
    assert traced == [False] * 3 + [True] * 3 + [False] * 2
    files = [path for path in tmp_path.rglob("plugins/profile/*/*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 0


def test_a_profile_that_is_never_reached_warns(example: Any, tmp_path: Path):
    with pytest.warns(UserWarning, match="recorded nothing: the training had 1 batches"):
        example.fit(dj.callbacks.ProfilerCallback(tmp_path))
    with pytest.raises(ValueError, match="last must be an integer >= 5; got 3"):
        dj.callbacks.ProfilerCallback(tmp_path, (5, 3))


TensorBoard = dj.callbacks.TensorBoard


def values(found: Any, tag: str) -> list[float]:
    return [number for _, number in found[tag]]


def test_epochs_are_written_under_keras_tags(example: Any, tmp_path: Path):
    example.fit(TensorBoard(tmp_path), epochs=2, validation_data=(example.x, example.y))
    train, held_out = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(train) == {"epoch_loss", "epoch_learning_rate"}
    assert train["epoch_loss"] == [(0, pytest.approx(25.5)), (1, pytest.approx(6.12255))]
    assert values(train, "epoch_learning_rate") == pytest.approx([0.01, 0.01])
    assert values(held_out, "epoch_loss") == pytest.approx([25.5 * 0.49**2, 25.5 * 0.49**4])
    assert [step for step, _ in held_out["evaluation_loss_vs_iterations"]] == [1, 2]


def test_batches_are_written_at_their_training_step(example: Any, tmp_path: Path):
    """Each number is that of its batch, although it is copied to the host later."""
    seen = []
    note = dj.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(logs["loss"]))
    example.fit(note, TensorBoard(tmp_path, update_freq="batch"), batch_size=2, epochs=2)
    found = scalars(tmp_path / "train")
    assert [step for step, _ in found["batch_loss"]] == list(range(1, 9))
    assert values(found, "batch_loss") == pytest.approx(seen)


def test_update_freq_and_speed(example: Any, tmp_path: Path):
    """Batches are counted through the epochs; a second fit continues from the optimizer's step."""
    board = TensorBoard(tmp_path, update_freq=3, write_steps_per_second=True)
    example.fit(board, batch_size=2, epochs=2)
    found = scalars(tmp_path / "train")
    assert [step for step, _ in found["batch_loss"]] == [3, 6]
    assert [step for step, _ in found["batch_steps_per_second"]] == [3, 6]
    assert all(number > 0 for number in values(found, "epoch_steps_per_second"))
    again = TensorBoard(tmp_path / "again", update_freq="batch")
    example.fit(again)
    assert [step for step, _ in scalars(tmp_path / "again" / "train")["batch_loss"]] == [9]


def test_weights_are_written_as_histograms(example: Any, tmp_path: Path):
    example.fit(TensorBoard(tmp_path, histogram_freq=2), epochs=3)
    found = [entry for entry in read(tmp_path / "train") if entry.plugin == "histograms"]
    assert [(entry.tag, entry.step) for entry in found] == [("w/histogram", 0), ("w/histogram", 2)]
    assert [entry.data[-1].tolist() for entry in found] == [
        [pytest.approx(0.49**n), pytest.approx(0.49**n), 1.0] for n in (1, 3)
    ]


def test_histograms_leave_nan_out_and_are_gathered_where_writing_fails(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of weights that are sharded over processes, gathering is a collective."""
    example.model.set_weights([np.full(1, np.nan)])
    example.fit(TensorBoard(tmp_path, histogram_freq=1))
    found = [entry for entry in read(tmp_path / "train") if entry.plugin == "histograms"]
    assert found[0].data.sum() == 0
    gathered = []

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dj.summary, "histogram", refuse)
    gather = _loggers.on_host
    monkeypatch.setattr(_loggers, "on_host", lambda x: gathered.append(x) or gather(x))
    with pytest.warns(RuntimeWarning, match="can no longer write"):
        example.fit(TensorBoard(tmp_path / "full", histogram_freq=1), epochs=2)
    assert len(gathered) == 2


def test_an_unknown_frequency_is_refused():
    with pytest.raises(ValueError, match="'epoch', 'batch'; got 'step'"):
        TensorBoard(update_freq="step")
