"""Variables, snapshots and checks over processes: the numbers of one process, the same errors on all."""

from __future__ import annotations

import numpy as np
import pytest
import saving_functions
import values_functions

from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def two_by_two():
    """What two processes with two devices each told."""
    return [r.value for r in LocalCluster(2, 2).run(values_functions.values_in_job)]


def test_each_process_has_its_replicas_components_and_all_read_the_same(two_by_two):
    """1 and 2, to which replica i adds i: sums 7 and 8, means 2.5 and 3.5, the first's 1 and 2."""
    for process, told in enumerate(two_by_two):
        found = told["variables"]
        first = [[1.0, 2.0], [2.0, 2.0]][process]
        np.testing.assert_equal(found["values"]["SUM"], np.array([first, [2 * process + 1] * 2]))
        for kind in ("MEAN", "ONLY_FIRST_REPLICA", "NONE"):
            wanted = [[1.0 + i, 2.0 + i] for i in (2 * process, 2 * process + 1)]
            np.testing.assert_equal(found["values"][kind], np.array(wanted))
        np.testing.assert_equal(found["read"]["SUM"], [7.0, 8.0])
        np.testing.assert_equal(found["read"]["MEAN"], [2.5, 3.5])
        np.testing.assert_equal(found["read"]["ONLY_FIRST_REPLICA"], [1.0, 2.0])
        for read in found["assigned"].values():
            np.testing.assert_equal(read, [9.0, 6.0])
        np.testing.assert_equal(found["added"], [10.0, 7.0])
        assert found["none"][0] == "ArgumentError"
        assert "aggregation=NONE" in found["none"][1]


def test_values_of_different_shapes_are_refused(two_by_two):
    """Each process sees its own two only, and would combine these."""
    for told in two_by_two:
        assert told["uneven"][0] == "UnsupportedError"
        assert "float64[1], float64[2], float64[3], float64[4]" in told["uneven"][1]


def test_the_device_that_is_out_of_sync_is_named_on_all(two_by_two):
    """Process 1 has another number on its second device; what is in sync passes."""
    for told in two_by_two:
        kind, text = told["out of sync"]
        assert kind == "OutOfSyncError"
        assert "of process 1 not as on cpu:0 of process 0" in text


def test_a_snapshot_stays(two_by_two):
    """While the variable goes on."""
    for told in two_by_two:
        np.testing.assert_equal(told["snapshot"], np.array([np.ones((2, 2)), np.full((2, 2), 2.0)]))


def test_steps_are_checked_against_one_device_and_against_padding(two_by_two):
    """As in one process: rows in order, the ratio 4 and the leak are found by all, and state stays."""
    alone = values_functions.checks(saving_functions.strategy_of(1))
    for told in [*(one["checks"] for one in two_by_two), alone]:
        np.testing.assert_allclose(told["rows"], values_functions.X.sum(-1), rtol=1e-6)
        assert told["wrong"][0] == "NotEqualError"
        assert "4.000 = number of replicas" in told["wrong"][1]
        assert told["leaks"][0] == "PaddingLeakError"
        assert told["kept"]
        assert (told["seen"], told["still seen"]) == (5.0, 5.0)
