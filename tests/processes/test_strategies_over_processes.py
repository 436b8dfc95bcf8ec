"""Replicas of several cores over processes, the collectives between them, and strategies beside them."""

from __future__ import annotations

import numpy as np
import pytest
import tpu_functions

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def told():
    """What two processes with four devices each told."""
    return [result.value for result in LocalCluster(2, 4).run(tpu_functions.compute)]


@pytest.fixture(scope="module")
def one_device():
    return tpu_functions.trained(dj.OneDeviceStrategy("cpu:0"))


@pytest.mark.exhaustive
def test_replicas_of_two_cores_over_two_processes_train_as_one_device(told, one_device):
    for i, process in enumerate(told):
        assert process["tpu"] == ({"data": 4, "model": 2}, 4, [2, 2, 1, 2])
        np.testing.assert_allclose(process["trained"], one_device, rtol=1e-5)
        assert process["rows"] == [[[0, 1], [2, 3]], [[4, 5], [6]]][i]
        assert process["ids"] == [[0, 1], [2, 3]][i]
        assert (process["mean"], process["gathered"]) == (3.0, list(range(7)))


@pytest.mark.exhaustive
def test_an_assignment_that_does_not_fit_the_processes_is_refused(told):
    """A replica over two processes, processes with unlike numbers of replicas, and another order."""
    over, uneven, order = told[0]["refused"]
    assert "belong to processes [0, 1]" in over
    assert "belong to processes [0, 0, 0]" in uneven
    assert "belong to processes [1, 1, 1, 1, 0, 0, 0, 0]" in order
    assert told[1]["refused"] == told[0]["refused"]


@pytest.mark.exhaustive
def test_the_collectives_between_processes_are_those_that_were_asked_for(told):
    """By the strategy's options or operation, unless the call says otherwise; the sums are the same."""
    for process in told:
        assert {tuple(process[n][0]) for n in ("auto", "ring", "packed", "hierarchical")} == {
            (28.0, 56.0, 28.0)
        }
        auto = {"psum": 3, "all-reduce": 1, "collective-permute": 0, "reduce-scatter": 0}
        assert process["auto"][1] == auto
        assert process["ring"][1]["all-reduce"] == 0
        assert process["ring"][1]["collective-permute"] > 0
        assert process["ring, asked for XLA's"]["all-reduce"] == 1
        assert process["packed"][1]["psum"] == 1
        assert process["hierarchical"][1]["reduce-scatter"] == 1


@pytest.mark.exhaustive
def test_strategies_of_one_process_use_its_devices_and_ignore_the_cluster(told, one_device):
    """They train on the whole batch, each process for itself, and a line of the log says so."""
    for process in told:
        alone = process["alone"]
        assert (alone["replicas"], alone["own devices"]) == ([4, 1], True)
        for numbers in alone["trained"]:
            np.testing.assert_allclose(numbers, one_device, rtol=1e-5)
        assert [line.split(":")[0] for line in alone["log"]] == [
            "MirroredStrategy ignores TF_CONFIG",
            "OneDeviceStrategy ignores TF_CONFIG",
        ]
