"""``fit``, ``evaluate``, ``predict`` and callbacks over processes: the numbers of one, written once."""

from __future__ import annotations

from pathlib import Path

import fit_functions
import numpy as np
import pytest
import saving_functions

from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the job writes."""
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def two_by_two(folder: Path):
    """What two processes with two devices each told."""
    cluster = LocalCluster(2, 2, timeout=100)
    return [result.value for result in cluster.run(fit_functions.fit_in_job, str(folder))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process told of the same training."""
    return fit_functions.train(saving_functions.strategy_of(1), tmp_path_factory.mktemp("alone"))


def test_every_process_has_the_numbers_of_one(two_by_two, alone):
    """Losses, metrics, the rate that a callback chose, weights, and all predictions, not its own share."""
    for told in two_by_two:
        for name in ("history", "evaluated", "predicted", "rate"):
            assert_close(told["train"][name], alone[name])
        for own, wanted in zip(told["train"]["weights"], alone["weights"], strict=True):
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
    first, second = (told["train"]["printed"] for told in two_by_two)
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


def test_a_loss_that_is_no_number_ends_all_at_one_batch(two_by_two):
    """Though the devices of process 0 never say that they are done; one of them warns."""
    first, second = (told["nan"] for told in two_by_two)
    assert first["ends"] == second["ends"]
    assert first["ends"][-1] < 9
    assert first["message"] == second["message"]
    assert "seen in batch 3" in first["message"]
    assert (first["warnings"], second["warnings"]) == ([first["message"]], [])


def test_weights_are_set_saved_and_loaded_by_all(two_by_two):
    """As numbers and as files."""
    assert [told["weights"] for told in two_by_two] == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_longer_trainings(tmp_path: Path):
    """The worked numbers of Keras; a backup that is gone on from bit by bit; DATA and arrays; "auto"."""
    cluster = LocalCluster(2, 2, timeout=200)
    both = [result.value for result in cluster.run(fit_functions.fit_at_length, str(tmp_path))]
    for told in both:
        for numbers in fit_functions.NUMBERS:
            assert told[numbers.__name__] == ["nothing", ""]
        backup = told["interrupted"]
        assert backup["error"] == ["RuntimeError", "interrupted"]
        assert backup["epochs"] == [1, 2]
        np.testing.assert_equal(backup["went on"], backup["whole"])
        assert backup["left"] == []
        assert told["data"][0] == told["data"][1]
    first, second = (told["auto"] for told in both)
    assert first == second, "the processes took different groups"
    assert first["ends"][-1] == 149
    assert len(first["ends"]) < 150, "nothing was measured"
