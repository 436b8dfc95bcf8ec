"""``BackupAndRestore``: an interrupted training continues and ends as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from tests.training.model_factory import compile_model, linear

pytestmark = pytest.mark.usefixtures("default_sigterm")


class InterruptedRunError(Exception):
    """What ends the first run."""


def interrupt(**hooks: int) -> dj.callbacks.LambdaCallback:
    """Returns a callback that fails in a hook at the given epoch or batch."""

    def failing(at: int) -> Any:
        def fail(number: int, logs: Any) -> None:
            if number == at:
                raise InterruptedRunError

        return fail

    return dj.callbacks.LambdaCallback(**{hook: failing(at) for hook, at in hooks.items()})


def backup(folder: Path, **options: Any) -> dj.callbacks.BackupAndRestore:
    return dj.callbacks.BackupAndRestore(folder / "backup", **options)


def resume(model: dj.Model, data: Any, after: int, *callbacks: Any, **options: Any) -> Any:
    """Interrupts a training after so many batches, and resumes it as a new process would."""
    count = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(count) == after:
            raise InterruptedRunError

    fails = dj.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(InterruptedRunError):
        model.fit(data, callbacks=[*callbacks, fails], verbose=0, **options)
    model.set_weights([np.full(1, 7.0)])  # a new process starts with other weights
    return model.fit(data, callbacks=list(callbacks), verbose=0, **options)


def batches_of_two(example: Any) -> list[Any]:
    return [(example.x[i : i + 2], example.y[i : i + 2]) for i in (0, 2, 4, 6)]


def test_a_training_resumes_at_the_failed_epoch(example: Any, tmp_path: Path):
    options = {"batch_size": 2, "shuffle": True, "epochs": 10}
    whole = example.fit(**options).history["loss"]
    weight = example.w
    example.reset()
    with pytest.raises(InterruptedRunError):
        example.fit(backup(tmp_path), interrupt(on_epoch_begin=4), **options)
    example.model.set_weights([np.full(1, 7.0)])  # a new process starts with other weights
    history = example.fit(backup(tmp_path), **options)
    assert history.epoch == [4, 5, 6, 7, 8, 9]
    assert history.history["loss"] == whole[4:]
    assert example.w == weight
    assert list((tmp_path / "backup").iterdir()) == []


@pytest.mark.parametrize("steps", [None, 3])
def test_a_backup_within_an_epoch_resumes_at_the_next_batch(
    example: Any, tmp_path: Path, steps: int | None
):
    """No batch is trained on twice, and the loss of the epoch is that of all its batches."""
    data = batches_of_two(example) * (1 if steps is None else 3)
    options = {"epochs": 2 if steps is None else 4, "steps_per_epoch": steps}
    whole = example.model.fit(data, verbose=0, **options).history["loss"]
    weight = example.w
    example.reset()
    begun: list[int] = []
    notes = dj.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, _: begun.append(batch))
    history = resume(example.model, data, 7, notes, backup(tmp_path, save_freq=5), **options)
    assert (history.epoch[0], begun[7]) == (1, 1 if steps is None else 2)
    assert history.history["loss"] == whole[1:]
    assert example.w == weight


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Your input ran out")
@pytest.mark.parametrize("steps", [None, 2, 3])
def test_a_backup_after_the_last_batch_of_a_pass_repeats_no_batch(
    example: Any, tmp_path: Path, steps: int | None
):
    """Also if the epoch has more steps than are left."""
    data, options = batches_of_two(example), {"epochs": 3, "steps_per_epoch": steps}
    whole = example.model.fit(data, verbose=0, **options).history["loss"]
    weight = example.w
    example.reset()
    history = resume(example.model, data, 4, backup(tmp_path, save_freq=1), **options)
    assert whole[-len(history.epoch) :] == history.history["loss"]
    assert example.w == weight


@pytest.mark.exhaustive
def test_a_resumed_epoch_keeps_its_learning_rate(example: Any, tmp_path: Path):
    data = batches_of_two(example)
    halve = dj.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    whole = example.model.fit(data, callbacks=[halve], epochs=3, verbose=0).history
    example.reset()
    saves = backup(tmp_path, save_freq=3)
    assert resume(example.model, data, 3, halve, saves, epochs=3).history == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [None, 3])
def test_batches_before_the_backup_are_not_read_again(
    example: Any, tmp_path: Path, steps: int | None
):
    """If the source can start at any batch."""
    read: list[float] = []

    def record(row: Any) -> Any:
        read.append(float(row[0][0]))
        return row

    data = dj.data.from_arrays((example.x, example.y)).map(record).shuffle(seed=3).batch(2)
    data = data if steps is None else data.repeat()
    options = {"epochs": 2, "steps_per_epoch": steps}
    whole = example.model.fit(data, verbose=0, **options).history["loss"]
    weight, order = example.w, read[:16]
    example.reset()
    starts = dj.callbacks.LambdaCallback(on_train_begin=lambda _: read.clear())
    history = resume(example.model, data, 3, starts, backup(tmp_path, save_freq=2), **options)
    assert history.history["loss"] == whole
    assert example.w == weight
    assert read[:4] == order[4:8]


@pytest.mark.exhaustive
def test_a_backup_within_an_epoch_resumes_with_other_replicas(tmp_path: Path):
    """On three replicas, with uneven shares, after one."""
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    options: Any = {"x": x, "y": x[:, :1], "batch_size": 8, "epochs": 2, "verbose": 0}

    def losses(replicas: int, *callbacks: Any) -> Any:
        model = compile_model(dj.MirroredStrategy(range(replicas)), linear(2))
        return model.fit(callbacks=list(callbacks), **options).history["loss"]

    with pytest.raises(InterruptedRunError):
        losses(1, backup(tmp_path, save_freq=1), interrupt(on_train_batch_end=0))
    resumed = losses(3, backup(tmp_path, save_freq=1))
    np.testing.assert_allclose(resumed, losses(1), rtol=1e-5)


@pytest.mark.exhaustive
def test_batches_per_replica_cannot_resume_with_other_replicas(tmp_path: Path):
    """The batches are dealt out in turn, so their number is not a position in the data."""
    refused = "a batch of 1 replicas in 1 processes and one of 2 replicas in 1 processes"
    for replicas, error, text in ((1, InterruptedRunError, None), (2, ValueError, refused)):
        strategy = dj.MirroredStrategy(range(replicas))
        model = compile_model(strategy, linear(1))
        batches = [(np.full((1, 1), i, np.float32),) * 2 for i in range(8)]
        data = strategy.distribute_datasets_from_function(lambda _, batches=batches: batches)
        callbacks = [backup(tmp_path, save_freq=1), interrupt(on_train_batch_end=1)]
        with pytest.raises(error, match=text):
            model.fit(data, epochs=2, verbose=0, callbacks=callbacks)


@pytest.mark.exhaustive
def test_backups_can_be_kept(example: Any, tmp_path: Path):
    example.fit(backup(tmp_path, delete_checkpoint=False), epochs=2)
    assert len(list((tmp_path / "backup").iterdir())) == 1
    weight = example.w
    assert example.fit(backup(tmp_path), epochs=2).epoch == []
    assert example.w == weight
    assert list((tmp_path / "backup").iterdir()) == []


@pytest.mark.exhaustive
def test_a_damaged_backup_warns_and_the_previous_one_is_used(example: Any, tmp_path: Path):
    options = {"double_checkpoint": True}
    with pytest.raises(InterruptedRunError):
        example.fit(backup(tmp_path, **options), interrupt(on_epoch_begin=3), epochs=5)
    newest = max((tmp_path / "backup").iterdir(), key=lambda folder: int(folder.name))
    for file in newest.rglob("*"):
        if file.is_file() and file.suffix == ".json":
            file.write_text(json.dumps({}))
    with pytest.warns(RuntimeWarning, match="damaged"):
        history = example.fit(backup(tmp_path, **options), epochs=5)
    assert history.epoch == [2, 3, 4]


def test_a_backup_of_another_model_is_refused(example: Any, tmp_path: Path, s2: Any):
    import optax

    with pytest.raises(InterruptedRunError):
        example.fit(backup(tmp_path), interrupt(on_epoch_begin=1), epochs=2)
    with s2.scope():
        other = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        other.compile(optax.sgd(0.1), "mse")
    with pytest.raises(dj.CheckpointError, match="kernel"):
        other.fit(example.x, example.y, callbacks=[backup(tmp_path)], verbose=0)


def test_arguments_are_checked(tmp_path: Path):
    with pytest.raises(ValueError, match="backup_dir must be a path; got ''"):
        dj.callbacks.BackupAndRestore("")
    with pytest.raises(ValueError, match="save_freq must be an integer >= 1; got 0"):
        backup(tmp_path, save_freq=0)
    with pytest.raises(ValueError, match="never saves"):
        backup(tmp_path, save_freq=False)


def test_a_checkpoint_of_the_best_epoch_can_be_loaded(example: Any, tmp_path: Path):
    example.model.learning_rate = 0.05  # overshoots: the first epoch is the best
    path = tmp_path / "best"
    example.fit(
        dj.callbacks.ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True),
        epochs=3,
    )
    example.model.load_weights(path)
    assert example.w == pytest.approx(-1.55)


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_test_end", "on_train_end"])
@pytest.mark.parametrize("save_freq", [False, 3])
def test_sigterm_after_the_last_batch_saves(
    example: Any, tmp_path: Path, save_freq: Any, hook: str
):
    """In the last validation and after it; all callbacks see the end of the epoch first."""
    ends: list[int] = []
    terminated = dj.callbacks.LambdaCallback(
        **{hook: lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.3))}
    )

    def again(*callbacks: Any) -> Any:
        saved = backup(tmp_path, save_freq=save_freq, save_before_preemption=True)
        data = {"x": example.x, "y": example.y, "validation_data": (example.x, example.y)}
        last = dj.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: ends.append(epoch))
        return example.model.fit(**data, verbose=0, callbacks=[*callbacks, saved, last])

    with pytest.raises(SystemExit) as left:
        again(terminated)
    assert left.value.code == 42
    assert ends == [0]
    trained = example.w
    example.reset()
    assert again().epoch == []
    assert example.w == trained


@pytest.mark.parametrize("save_freq", [False, "epoch"])
def test_sigterm_saves_after_the_batch_and_training_resumes(
    example: Any, tmp_path: Path, save_freq: Any
):
    data = batches_of_two(example)
    whole = example.model.fit(data, epochs=2, verbose=0).history["loss"]
    weight = example.w
    example.reset()
    seen: list[int] = []

    class Terminated(dj.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if len(seen) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)

    def again() -> Any:
        saved = backup(tmp_path, save_freq=save_freq, save_before_preemption=True)
        return example.model.fit(data, epochs=2, verbose=0, callbacks=[Terminated(), saved])

    with pytest.raises(SystemExit) as left:
        again()
    assert left.value.code == 42
    example.model.set_weights([np.full(1, 7.0)])  # a new process starts with other weights
    history = again()
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]
    assert history.history["loss"] == whole[1:]
    assert example.w == weight
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
