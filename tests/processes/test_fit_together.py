"""``fit``, ``evaluate``, ``predict`` and callbacks over processes: the numbers of one, written once."""

from __future__ import annotations

import io
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import saving_functions
from flax import nnx
from saving_functions import message, strategy_of

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import test_fit_numbers

pytestmark = pytest.mark.exhaustive

NUMBERS = (
    test_fit_numbers.test_whole_and_partial_batches_train_as_on_one_device,
    test_fit_numbers.test_evaluate_and_predict_see_every_example_once,
    test_fit_numbers.test_several_steps_in_one_dispatch_change_nothing_but_the_callbacks,
)
X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]])).astype(np.float32)


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jax.nn.relu(self.first(x)))


def made(strategy, **options):
    with strategy.scope():
        model = dj.Model(Net(nnx.Rngs(1)))
        model.compile("adam", loss="mse", **{"metrics": ["mae"], **options})
    return model


def plain(history):
    return {name: [float(v) for v in values] for name, values in history.items()}


def train(strategy, folder):
    """Returns the history, predictions and output of a fit with all callbacks that write or decide."""
    folder, printed = Path(folder), io.StringIO()
    folder.mkdir(exist_ok=True)
    model = made(strategy)
    callbacks = [
        dj.callbacks.CSVLogger(folder / "log.csv"),
        dj.callbacks.TensorBoard(folder / "logs", update_freq="batch", histogram_freq=1),
        dj.callbacks.ModelCheckpoint(folder / "models" / "{epoch}", save_best_only=True, verbose=1),
        dj.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, verbose=1),
        dj.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0, verbose=1),
        dj.callbacks.TerminateOnNaN(),
    ]
    with redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(
            X, Y, batch_size=8, epochs=3, validation_split=1 / 3, verbose=2, callbacks=callbacks
        )
        evaluated = model.evaluate(X, Y, batch_size=8, verbose=2, return_dict=True)
    return {
        "history": plain(history.history),
        "evaluated": {name: float(value) for name, value in evaluated.items()},
        "predicted": model.predict(X, batch_size=8, verbose=0),
        "weights": model.get_weights(),
        "rate": model.learning_rate,
        "printed": printed.getvalue(),
    }


def fit_in_job(folder):
    """Fits with callbacks, and one that ends early."""
    strategy, folder = strategy_of(2), Path(folder)
    return {
        "train": train(strategy, folder / "train"),
        "nan": ended_by_nan(strategy),
        "weights": weights(strategy, folder),
        "guarded": guarded(strategy),
    }


def fit_at_length(folder):
    """Returns the results of the parts that compile many programs."""
    strategy = strategy_of(2)
    outcome = {f.__name__: message(lambda f=f: f(strategy)) for f in NUMBERS}
    outcome["interrupted"] = interrupted(strategy, Path(folder) / "backup")
    outcome["data"] = data(strategy)
    outcome["auto"] = grouped(strategy)
    return outcome


class Fails(dj.callbacks.Callback):
    """Raises after the second batch of the second epoch, on all processes."""

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 1:
            raise RuntimeError("interrupted")

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def interrupted(strategy, folder):
    """Returns the weights of a training that failed and was resumed, and of one that did not fail."""
    data = {"batch_size": 8, "epochs": 3, "verbose": 0}
    whole, first, second = made(strategy), made(strategy), made(strategy)
    whole.fit(X, Y, **data)

    def backup():
        return dj.callbacks.BackupAndRestore(folder, save_freq=2)

    error = message(lambda: first.fit(X, Y, callbacks=[backup(), Fails()], **data))
    history = second.fit(X, Y, callbacks=[backup()], **data)
    return {
        "error": error,
        "epochs": list(history.epoch),
        "whole": whole.get_weights(),
        "went on": second.get_weights(),
        "left": sorted(path.name for path in folder.glob("[0-9]*")),
    }


def data(strategy):
    """Returns the losses of an epoch of arrays, and of batches under ``AutoShardPolicy.DATA``."""
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, len(X), 8)]
    found = strategy.distribute_dataset(batches, dj.InputOptions(auto_shard_policy="data"))
    arrays = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return [
        made(strategy).fit(found, verbose=0).history["loss"][0],
        made(strategy).fit(X, Y, **arrays).history["loss"][0],
    ]


def ended_by_nan(strategy):
    """Returns where a training ended whose loss is not finite from batch 3 on."""
    x = np.ones((80, 3), np.float32)
    x[24:] = np.inf
    model, guard, ends = made(strategy), dj.callbacks.TerminateOnNaN(), test_fit_numbers.Ends()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[ends, guard])
    outcome = [str(one.message) for one in caught if "no longer finite" in str(one.message)]
    return {"ends": ends.ends, "message": guard.message, "warnings": outcome}


def guarded(strategy):
    """Corrupts a copy in one process, and feeds bad batches, of which too many end the training."""
    x = X.copy()
    x[16:17] = np.nan  # of the third batch, on the first replica
    data = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model, kernel = made(strategy, skip_nonfinite=True), "first.kernel"

    def spoil(batch, logs):
        raw = model.module.first.kernel.get_raw_value()
        shards = raw.addressable_shards
        parts = [
            jax.device_put(np.asarray(s.data) + (jax.process_index() == 1 and i == 1), s.device)
            for i, s in enumerate(shards)
        ]
        new = jax.make_array_from_single_device_arrays(raw.shape, raw.sharding, parts)
        if batch == 1:
            model.module.first.kernel.set_raw_value(new)

    spoils = dj.callbacks.LambdaCallback(on_train_batch_end=spoil)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heals = dj.callbacks.CheckInSync(every=2, policy="heal")
        model.fit(x, Y, callbacks=[spoils, heals], **data)
    dj.check_in_sync((model.module, model.optimizer))
    other, ends = made(strategy), test_fit_numbers.Ends()
    never = dj.Optimizer(other.module, optax.sgd(0.1), skip_nonfinite=True, max_consecutive=0)
    other.compile(never, loss="mse")
    x = np.repeat(X[:8], 10, 0) / np.repeat(np.arange(10) != 3, 8)[:, None]  # the fourth batch
    error = message(lambda: other.fit(x, x[:, :1], callbacks=[ends], **data))
    return {
        "warnings": [str(one.message) for one in caught if kernel in str(one.message)],
        "skipped": model.optimizer.skipped_steps,
        "weights": model.get_weights(),
        "error": error,
        "ends": ends.ends,
    }


def grouped(strategy):
    """Returns the ends of dispatches while steps_per_execution is measured, at different speeds."""
    model, ends = made(strategy, steps_per_execution="auto"), test_fit_numbers.Ends()
    data = strategy.distribute_dataset(dj.data.from_arrays((X[:8], Y[:8])).batch(8).repeat(150))
    clock, times = time.perf_counter, 1 + jax.process_index()

    def slower() -> float:
        return times * clock()

    with mock.patch.object(time, "perf_counter", slower):
        model.fit(data, verbose=0, callbacks=[ends])
    return {"ends": ends.ends, "size": model.trainer.steps_per_execution("train").size}


def weights(strategy, folder):
    """Returns weights that were set, and weights that were saved and loaded."""
    model, other = made(strategy), made(strategy)
    new = [np.full(w.shape, i, w.dtype) for i, w in enumerate(model.get_weights())]
    model.set_weights(new)
    model.save_weights(folder / "weights")
    other.load_weights(folder / "weights")
    model.save(folder / "all")
    other.load(folder / "all")
    return [float(np.mean(w)) for w in other.get_weights()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns the folder to which the job writes."""
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def two_by_two(folder: Path):
    """Returns the results of two processes with two devices each."""
    cluster = LocalCluster(2, 2, timeout=100)
    return [result.value for result in cluster.run(fit_in_job, str(folder))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns the results of the same training in one process."""
    return train(saving_functions.strategy_of(1), tmp_path_factory.mktemp("alone"))


def test_every_process_has_the_numbers_of_one(two_by_two, alone):
    """Losses, metrics, the rate that a callback chose, weights, and all predictions, not its own share."""
    for outcome in two_by_two:
        for name in ("history", "evaluated", "predicted", "rate"):
            assert_close(outcome["train"][name], alone[name])
        for own, wanted in zip(outcome["train"]["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(own, wanted, 1e-5, 1e-6)
    for name in ("history", "evaluated", "predicted"):
        np.testing.assert_equal(two_by_two[0]["train"][name], two_by_two[1]["train"][name])


def assert_close(own, wanted):
    if isinstance(wanted, dict):
        assert own.keys() == wanted.keys()
        for name in wanted:
            assert_close(own[name], wanted[name])
    else:
        np.testing.assert_allclose(own, wanted, 1e-5, 1e-6)


def test_a_job_writes_and_prints_once(two_by_two, folder: Path):
    """One CSV file with a line for each epoch, one event file for each run, models, and lines."""
    first, second = (outcome["train"]["printed"] for outcome in two_by_two)
    assert [first.count(f"Epoch {i}/3") for i in (1, 2, 3)] == [1, 1, 1]
    for line in (
        "saving the model to",
        "evaluate - ",
        "ReduceLROnPlateau sets the rate",
        "Restoring the weights",
    ):
        assert line in first, first
    assert second == ""
    rows = (folder / "train" / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "2"]
    for run in ("train", "validation"):
        assert len(list((folder / "train" / "logs" / run).iterdir())) == 1
    assert (folder / "train" / "models" / "1" / "manifest.json").exists()


def test_a_nan_loss_ends_all_processes_at_the_same_batch(two_by_two):
    """With the same message; one of them warns."""
    first, second = (outcome["nan"] for outcome in two_by_two)
    assert first["ends"] == second["ends"]
    assert first["ends"][-1] < 9
    assert first["message"] == second["message"]
    assert "seen in batch 3" in first["message"]
    assert (first["warnings"], second["warnings"]) == ([first["message"]], [])


def test_copies_are_healed_and_bad_batches_skipped_by_all(two_by_two):
    """With the same weights on both; one of them warns, and the error comes at one batch."""
    first, second = (outcome["guarded"] for outcome in two_by_two)
    assert second["warnings"] == []
    assert "of process 1 unequal to cpu:0 of process 0" in first["warnings"][0]
    assert (first["skipped"], second["skipped"]) == (1, 1)
    np.testing.assert_equal(first["weights"], second["weights"])
    assert np.isfinite(first["weights"][0]).all()
    assert first["error"] == second["error"]
    assert first["error"][0] == "StepsSkippedError"
    assert "step 3" in first["error"][1]
    assert first["ends"] == second["ends"] == list(range(7))


def test_weights_are_set_saved_and_loaded_by_all(two_by_two):
    """As numbers and as files."""
    assert [outcome["weights"] for outcome in two_by_two] == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_longer_trainings(tmp_path: Path):
    """The worked numbers of Keras; a backup that is gone on from bit by bit; DATA and arrays; "auto"."""
    cluster = LocalCluster(2, 2, timeout=200)
    both = [result.value for result in cluster.run(fit_at_length, str(tmp_path))]
    for outcome in both:
        for numbers in NUMBERS:
            assert outcome[numbers.__name__] == ["nothing", ""]
        backup = outcome["interrupted"]
        assert backup["error"] == ["RuntimeError", "interrupted"]
        assert backup["epochs"] == [1, 2]
        np.testing.assert_equal(backup["went on"], backup["whole"])
        assert backup["left"] == []
        assert outcome["data"][0] == outcome["data"][1]
    first, second = (outcome["auto"] for outcome in both)
    assert first == second, "the processes took different groups"
    assert first["ends"][-1] == 149
    assert len(first["ends"]) < 150, "nothing was measured"
