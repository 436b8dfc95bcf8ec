"""The processes of a job save and load one checkpoint together, or fail together with the same error."""

from __future__ import annotations

import numpy as np
import pytest
import saving_functions

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with what a process alone has saved, as "alone", and its numbers a step later."""
    folder = tmp_path_factory.mktemp("saved")
    strategy = saving_functions.strategy_of(1)
    tree = saving_functions.tree_of(strategy)
    saving_functions.train(strategy, tree, 2)
    dj.checkpoint.save(folder / "alone", tree)
    saving_functions.train(strategy, tree, 1)
    return folder, saving_functions.numbers(tree)


@pytest.fixture(scope="module")
def two_by_two(saved):
    """The results of two processes with two devices each, after they loaded what one process saved."""
    cluster = LocalCluster(2, 2, timeout=100)
    return [r.value for r in cluster.run(saving_functions.keep_steps, str(saved[0]), "alone")]


def test_a_checkpoint_of_one_process_continues_in_two(saved, two_by_two):
    """Saved 1 × 4, loaded 2 × 2: every bit, and the next step equals that of one process."""
    folder, trained = saved
    wanted = saving_functions.loaded(folder / "alone", dj.OneDeviceStrategy("cpu:0"))
    for outcome in two_by_two:
        for name, value in wanted.items():
            np.testing.assert_array_equal(outcome["loaded"][name], value, name)
            np.testing.assert_allclose(
                outcome["trained"][name], trained[name], 1e-5, 1e-6, err_msg=name
            )


def test_a_checkpoint_of_two_processes_is_loaded_by_four_and_back(saved, two_by_two):
    """Saved 2 × 2, loaded and saved 4 × 1, loaded 1 × 4 and on one device: every bit."""
    folder, _ = saved
    four = LocalCluster(4, 1, timeout=100).run(
        saving_functions.pass_on, str(folder), "four by one", "two by two"
    )
    wanted = two_by_two[0]["loaded"]
    alone = [
        saving_functions.loaded(folder / "four by one", strategy)
        for strategy in (saving_functions.strategy_of(1), dj.OneDeviceStrategy("cpu:0"))
    ]
    for outcome in [*(result.value for result in four), *alone]:
        for name, value in wanted.items():
            np.testing.assert_array_equal(outcome[name], value, name)


def test_a_manager_keeps_the_same_steps_on_all_processes(two_by_two):
    """The directory is one; a step that process 1 finds damaged is set aside for both, with one warning."""
    for outcome in two_by_two:
        assert outcome["first"] is None
        assert [outcome[f"saved {step}"] for step in (1, 2, 3)] == [True] * 3
        assert outcome["steps"] == [2, 3]
        assert outcome["restored"] == 2
        assert outcome["as saved"]
        assert outcome["left"] == [2]
        assert outcome["still"], "errors have changed the tree"
    first, second = two_by_two
    assert "step 3 is damaged and was set aside as 3.damaged" in first["warnings"][0]
    assert "process 1" in first["warnings"][0]
    assert second["warnings"] == []


def test_the_clock_of_process_0_decides(two_by_two):
    """By its own clock process 1 would save, and wait for the others forever."""
    assert [outcome["by the clock"] for outcome in two_by_two] == [[False, False]] * 2


FAILURES = {
    "again": ("CheckpointError", ["holds step 3 already"]),
    "differ": ("CheckpointError", ["['b']['me']: a Python int with the sha256"]),
    "more": ("CheckpointError", ["['b']: nothing on process 0, a Python int"]),
    "unlike": ("ProcessesDifferError", ["all_steps on process 0", "wait on process 1", "together"]),
    "forced": ("ProcessesDifferError", ["save on process 0", "save(force=True) on process 1"]),
    "apart": ("CheckpointFileError", ["process 1 (", "cannot find it", "network"]),
    "apart, at first": ("CheckpointFileError", ["cannot find it"]),
    "chief": ("CheckpointFileError", ["is a folder with other files in it"]),
    "later": ("CheckpointFileError", ["broken/2 could not be written"]),
    "missing": ("CheckpointError", ["There is no checkpoint at"]),
    "other step": ("CheckpointError", ["the step or name: 8 on process 0, 9 on process 1"]),
    "misfit on 1": (
        "CheckpointError",
        ["['best']: expected a Python float (saved), got a Python str"],
    ),
    "no step": ("CheckpointError", ["There is no step 9", "There are [2]"]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_of_one_process_is_raised_on_all(two_by_two, case: str):
    """With the same class and reason, and no process waits for another."""
    kind, texts = FAILURES[case]
    for outcome in two_by_two:
        assert outcome[case][0] == kind, outcome[case][1]
        for text in texts:
            assert text in outcome[case][1]
