"""Several processes compute as one: the same values, examples and weights as on one device."""

from __future__ import annotations

import numpy as np
import pytest
import together_functions

import distribute_jax as dj
from distribute_jax.testing import LocalCluster


@pytest.fixture(scope="module")
def two_by_two():
    """What two processes with two devices each told."""
    return [result.value for result in LocalCluster(2, 2).run(together_functions.compute)]


@pytest.fixture(scope="module")
def steps():
    """What two processes with two devices each told of ten steps of training."""
    return [result.value for result in LocalCluster(2, 2).run(together_functions.train)]


def test_values_reductions_and_gathers_are_those_of_all_processes(two_by_two):
    """Case 22: each process makes and sees its own replicas' values; what is combined is the same on all."""
    first, second = two_by_two
    assert (first["task"], second["task"]) == (("worker", 0, 2), ("worker", 1, 2))
    assert (first["chief"], second["chief"]) == (True, False)
    assert (first["made"], second["made"]) == ([0.0, 1.0], [12.0, 13.0])
    assert (first["doubled"], second["doubled"]) == ([0.0, 2.0], [24.0, 26.0])
    for told in two_by_two:
        assert told["replicas"] == 4
        assert (told["sum"], told["mean"]) == (26.0, 6.5)
        assert told["gathered"] == [0.0, -0.0, 1.0, -1.0, 12.0, -12.0, 13.0, -13.0]
        assert told["gathered inside"] == [0.0, 1.0, 12.0, 13.0]


def test_first_values_that_differ_become_those_of_process_0(two_by_two):
    """Case 70: 5 and 6 become 5 on both, and so do weights of other seeds; one warning for each, on one
    process, names the first leaf."""
    first, second = two_by_two
    assert first["late"] == second["late"] == 5.0
    assert first["seeded"] == second["seeded"]
    assert second["warnings"] == []
    assert ["late" in first["warnings"][0], "kernel" in first["warnings"][1]] == [True, True]


@pytest.mark.exhaustive
def test_ten_steps_of_four_processes_are_those_of_two(steps):
    """The digits CNN with a partial batch: 2 × 2 and 4 × 1 to the last bit of losses, weights and Adam."""
    four_by_one = [result.value for result in LocalCluster(4, 1).run(together_functions.train)]
    runs = steps + four_by_one
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.exhaustive
def test_ten_steps_are_those_of_one_process_and_of_one_device(steps):
    """The digits CNN with a partial batch: the same on both processes; 1 × 4 and one device to 1e-5."""
    assert steps[0] == steps[1]
    for alone in (dj.MirroredStrategy([0, 1, 2, 3]), dj.OneDeviceStrategy("cpu:0")):
        losses = together_functions.ten_steps(alone)["losses"]
        np.testing.assert_allclose(steps[0]["losses"], losses, rtol=1e-5)


@pytest.mark.exhaustive
def test_two_workers_read_what_the_reference_says():
    """Cases 93, 95, 96, 99, 107 and the limits of FILE; sources that end, differ or fail on one process."""
    first, second = (result.value for result in LocalCluster(2, 1).run(together_functions.read))
    rows = {
        "93 data": ([[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14, 15]]),
        "93 off": ([[i, i + 1] for i in range(0, 16, 2)],) * 2,
        "95": ([[0], [2], [4]], [[1], [3], []]),
        "96 data": ([[0, 1], [3, 4]], [[2], [5]]),
        "96 off": ([[0, 1], [2], [3, 4], [5]], [[0], [1, 2], [3], [4, 5]]),
        "99 file": ([[0, 1], [2, 3], [20, 21], [22, 23]], [[10, 11], [12, 13], [], []]),
        "99 data": ([[0, 1], [10, 11], [20, 21]], [[2, 3], [12, 13], [22, 23]]),
        "107": ([[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13]]),
    }
    for name, wanted in rows.items():
        for told, mine in zip((first, second), wanted, strict=True):
            assert [only for (only,) in told[name]] == mine, name
    for told in (first, second):
        assert told["uneven"] == [4.0, 4.0, 2.0]
        assert told["uneven counts"] == [None, None, (0, 2)]
        assert told["after a break"] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]], [[6.0, 7.0]]]
        assert told["resumed"]
        assert "at least 2 files" in told["one file"]
        assert "Process 0 has no batch at all" in told["nothing"]
        assert "process 1" in told["dtypes"]
        assert "int32" in told["dtypes"]
    assert "The input of process 1 failed" in first["fails"]
