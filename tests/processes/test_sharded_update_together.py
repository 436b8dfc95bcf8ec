"""A sharded update over the devices of two processes."""

from __future__ import annotations

import numpy as np
import pytest
import sharing_functions

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with four devices: what it trained and saved, and how it goes on."""
    folder = tmp_path_factory.mktemp("shared")
    strategy = dj.MirroredStrategy([0, 1, 2, 3])
    tree = sharing_functions.tree_of(strategy)
    trained = sharing_functions.train(strategy, tree, sharing_functions.X[:4])
    dj.checkpoint.save(folder / "alone", tree)
    return folder, trained, sharing_functions.train(strategy, tree, sharing_functions.X[4:6])


@pytest.fixture(scope="module")
def told(alone):
    """What two processes with two devices each told."""
    cluster = LocalCluster(2, 2, timeout=100)
    return [r.value for r in cluster.run(sharing_functions.share_in_job, str(alone[0]))]


def assert_alike(got, wanted):
    """Compares losses and weights."""
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_two_processes_train_as_one_and_hold_an_nth_each(alone, told):
    """Losses and weights are those of mirrored state, also for another step, and when verified."""
    _, trained, later = alone
    for process in told:
        assert process["processes"] == 2
        assert_alike(process["trained"], trained)
        assert_alike(process["verified"], later)
        assert process["shares"] == [(16, 32)] * 2
        assert process["whole"] == [(32,)] * 2
        assert "shard_optimizer_state=True" in process["repr"]


def test_checkpoints_go_from_a_job_to_one_process_and_back(alone, told):
    """Saved by one process with mirrored state and loaded in the job, and the other way round."""
    folder, _, later = alone
    for process in told:
        assert_alike(process["loaded"], later)
    for strategy in (
        dj.MirroredStrategy([0, 1, 2, 3]),
        dj.MirroredStrategy([0, 1], shard_optimizer_state=True),
    ):
        tree = sharing_functions.tree_of(strategy)
        dj.checkpoint.load(folder / "job", tree)
        assert_alike(sharing_functions.train(strategy, tree, sharing_functions.X[4:6]), later)
